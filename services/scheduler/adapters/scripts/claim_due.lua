-- Answers tickets whose message nobody acknowledged in time; the caller delivers them (again).
local due = {}
for _, id in ipairs(q.ripe('due')) do
  local r = q.read(id)
  if not r then
    call('ZREM', q.key('due'), id)
  elseif r.st == 'refused' and now - r.ed >= P.DELIVERY then
    call('ZREM', q.key('due'), id)
    q.write_end(id)
  else
    call('ZADD', q.key('due'), now + P.RETRY, id)
    due[#due + 1] = q.ticket(r)
  end
end
return due
