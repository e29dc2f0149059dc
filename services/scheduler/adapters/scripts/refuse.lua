-- ARGV: 3 version, 4 deadline before, 5 reason, 6 message. Answers refused tickets, earliest deadline first.
local version, before = ARGV[3], ARGV[4]
local v, found = q.version_of(version), {}
for class = 1, 3 do
  local lane = q.lane_of(v, class)
  for _, seat in ipairs(call('ZRANGE', lane.seats, 0, -1)) do
    local queue = lane.queues .. string.sub(seat, 17)
    local members = call('ZRANGE', queue, '-inf', '(' .. before, 'BYSCORE', 'LIMIT', 0, P.BATCH, 'WITHSCORES')
    for i = 1, #members, 2 do
      found[#found + 1] = {id = string.sub(members[i], 17), deadline = tonumber(members[i + 1])}
    end
  end
end
table.sort(found, function(a, b)
  if a.deadline ~= b.deadline then return a.deadline < b.deadline end
  return a.id < b.id
end)
local refused = {}
for i = 1, math.min(#found, P.BATCH) do refused[i] = q.refuse(q.read(found[i].id), ARGV[5], ARGV[6]) end
q.save()
return refused
