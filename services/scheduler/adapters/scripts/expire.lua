-- Answers {refused tickets, lapsed tickets}. Also forgets instances that nobody used for a day, and void notes about
-- residency where there are many: nodes and versions come and go, and nobody else takes those of the gone away.
local function forget(name) -- a note begins with the time until which it counts
  if call('HLEN', q.key(name)) <= P.NOTES then return end
  local notes = call('HGETALL', q.key(name))
  for i = 1, #notes, 2 do
    if tonumber(string.match(notes[i + 1], '^%d+')) <= now then call('HDEL', q.key(name), notes[i]) end
  end
end
local refused, lapsed = q.refuse_overdue(), {}
for _, id in ipairs(q.ripe('leases')) do
  local r = q.read(id)
  if r then
    q.release(r, r.lx - P.LEASE - r.gr, false)
    r.st, r.ed = 'lapsed', now
    r.lx = r.lx - P.LEASE -- from now on: when it was last renewed, so that whoever settles it says the same
    q.write(r)
    call('ZADD', q.key('due'), now + P.RETRY, id)
    lapsed[#lapsed + 1] = q.ticket(r)
  else
    call('ZREM', q.key('leases'), id)
  end
end
call('ZREMRANGEBYSCORE', q.key('used'), '-inf', now - P.IDLE_SECONDS * 1000)
forget('drains')
forget('loads')
forget('failures')
q.save()
return {refused, lapsed}
