-- Answers {refused tickets, lapsed tickets}. Also forgets instances that nobody used for a day.
local refused, lapsed = refuse_overdue(), {}
for _, id in ipairs(ripe('leases')) do
  local r = read(id)
  if r then
    release(r, r.lx - LEASE - r.gr, false)
    r.st, r.ed = 'lapsed', now
    r.lx = r.lx - LEASE -- from now on: when it was last renewed, so that whoever settles it says the same
    write(r)
    call('ZADD', key('due'), int(now + RETRY), id)
    lapsed[#lapsed + 1] = ticket(r)
  else
    call('ZREM', key('leases'), id)
  end
end
call('ZREMRANGEBYSCORE', key('used'), '-inf', int(now - IDLE_SECONDS * 1000))
return {refused, lapsed}
