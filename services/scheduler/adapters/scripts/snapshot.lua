-- Answers {revision, lanes, in use, used, drains, loads, failures, owners}; lanes are
-- {lane id, waiting, oldest ms, run ms}.
local lanes = {}
for _, lane in ipairs(call('SMEMBERS', key('lanes'))) do
  local class, version = string.match(lane, '^(%d):(.*)$')
  local run = floor(num(call('HGET', version_key(version), 'ra')) / 1000)
  lanes[#lanes + 1] = {lane, lane_waiting(class, version), int(oldest(class, version)), int(run)}
end
return {
  int(num(call('GET', key('revision')))), lanes, call('HGETALL', key('in_use')),
  call('ZRANGE', key('used'), 0, -1, 'WITHSCORES'), call('HGETALL', key('drains')),
  call('HGETALL', key('loads')), call('HGETALL', key('failures')),
  call('HGETALL', key('owners')),
}
