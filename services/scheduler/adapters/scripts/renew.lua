-- ARGV: for each lease from 3 on: attempt, input, cached, output tokens. Answers the attempts that are not held.
local missing = {}
for i = 3, #ARGV, 4 do
  local r = q.read(ARGV[i])
  if r and r.st == 'granted' then
    r.ui, r.uc, r.uo = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
    if r.uo > 0 then q.leave_prefill(r) end
    r.lx = math.max(r.lx, now + P.LEASE)
    call('ZADD', q.key('leases'), r.lx, r.id)
    call('ZREM', q.key('due'), r.id) -- who renews a lease has its grant
    local units = q.units_of(r, now - r.gr)
    if units > r.un then q.correct(r, units) end
    q.write(r)
  else
    missing[#missing + 1] = ARGV[i]
  end
end
q.save()
return missing
