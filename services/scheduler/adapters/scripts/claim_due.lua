-- Answers tickets whose message nobody acknowledged in time; the caller delivers them (again).
local due = {}
for _, id in ipairs(ripe('due')) do
  local r = read(id)
  if not r then
    call('ZREM', key('due'), id)
  elseif r.st == 'refused' and now - r.ed >= DELIVERY then
    call('ZREM', key('due'), id)
    bury(r)
  else
    call('ZADD', key('due'), int(now + RETRY), id)
    due[#due + 1] = ticket(r)
  end
end
return due
