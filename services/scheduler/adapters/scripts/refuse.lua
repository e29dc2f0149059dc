-- ARGV: 3 version, 4 deadline before, 5 reason, 6 message. Answers refused tickets, earliest deadline first.
local version, before = ARGV[3], tonumber(ARGV[4])
local found = {}
for class = 1, 3 do
  for _, seat in ipairs(call('ZRANGE', tenants_key(class, version), 0, -1)) do
    local queue = queue_key(class, version, string.sub(seat, 17))
    local members = call('ZRANGE', queue, '-inf', '(' .. int(before), 'BYSCORE', 'LIMIT', 0, BATCH, 'WITHSCORES')
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
for i = 1, math.min(#found, BATCH) do refused[i] = refuse(read(found[i].id), ARGV[5], ARGV[6]) end
return refused
