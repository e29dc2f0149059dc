-- Answers {revision, lanes, in use, used, drains, loads, failures, owners}; lanes are
-- {lane id, waiting, oldest ms, run ms}.
local lanes = {}
for _, lane in ipairs(call('SMEMBERS', q.key('lanes'))) do
  local class, version = string.match(lane, '^(%d):(.*)$')
  local v = q.version_of(version)
  local count = v.waiting[tonumber(class)]
  lanes[#lanes + 1] = {lane, count, q.oldest(q.lane_of(v, tonumber(class))), floor(v.run / 1000)}
end
return {
  q.num(call('GET', q.key('revision'))), lanes, call('HGETALL', q.key('in_use')),
  call('ZRANGE', q.key('used'), 0, -1, 'WITHSCORES'), call('HGETALL', q.key('drains')),
  call('HGETALL', q.key('loads')), call('HGETALL', q.key('failures')),
  call('HGETALL', q.key('owners')),
}
