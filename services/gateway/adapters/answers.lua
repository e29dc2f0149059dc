-- Claims and kept answers of a tenant's idempotency keys, one atomic step each. Words: domain/idempotency.py.
-- KEYS (one tenant, one slot): 1 entry of the key (for 'erase': the common beginning of all entries)
--       2 index: sorted set of keys by their end, ms  3 bytes: hash of key → size, and 'total'
-- ARGV: 1 what to do  2 now ms ("" = the store's clock), then for
--       claim: 3 key  4 fingerprint  5 owner  6 lease ms  7 keep ms  8 most keys  9 most bytes
--       renew: 3 owner  4 lease ms;  keep: 3 key  4 owner  5 answer ("" = too long to keep);  release: 3 key  4 owner
-- claim returns {'claimed'}, {'busy'}, {'kept', answer}, {'differs'} or {'full', ms until the oldest ends}; the others 1 if
-- they had an effect, else 0; erase how many keys there were.
local what, now = ARGV[1], tonumber(ARGV[2])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local function whole(number) return string.format('%.0f', number) end

local function forget(key)
  local size = tonumber(redis.call('HGET', KEYS[3], key))
  if size then
    redis.call('HINCRBY', KEYS[3], 'total', -size)
    redis.call('HDEL', KEYS[3], key)
  end
  redis.call('ZREM', KEYS[2], key)
end

if what == 'claim' then
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', whole(now), 'LIMIT', 0, 100)) do forget(key) end
  local entry = redis.call('HMGET', KEYS[1], 'fingerprint', 'state', 'owner', 'until', 'answer')
  if entry[1] then
    if entry[1] ~= ARGV[4] then return {'differs'} end
    if entry[2] == 'kept' then return {'kept', entry[5]} end
    if entry[3] ~= ARGV[5] and tonumber(entry[4]) > now then return {'busy'} end
  else
    local oldest = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
    if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[8])
        or (tonumber(redis.call('HGET', KEYS[3], 'total')) or 0) >= tonumber(ARGV[9]) then
      return {'full', math.max(1, (tonumber(oldest) or now) - now)}
    end
    redis.call('ZADD', KEYS[2], whole(now + tonumber(ARGV[7])), ARGV[3])
  end
  redis.call('HSET', KEYS[1], 'fingerprint', ARGV[4], 'state', 'running', 'owner', ARGV[5],
             'until', whole(now + tonumber(ARGV[6])))
  if not entry[1] then redis.call('PEXPIRE', KEYS[1], ARGV[7]) end
  redis.call('PEXPIRE', KEYS[2], ARGV[7])
  redis.call('PEXPIRE', KEYS[3], ARGV[7])
  return {'claimed'}
end

if what == 'erase' then
  local keys = redis.call('ZRANGE', KEYS[2], 0, -1)
  for _, key in ipairs(keys) do redis.call('DEL', KEYS[1] .. key) end
  redis.call('DEL', KEYS[2], KEYS[3])
  return #keys
end

local owner = what == 'renew' and ARGV[3] or ARGV[4]
local entry = redis.call('HMGET', KEYS[1], 'state', 'owner')
if entry[1] ~= 'running' or entry[2] ~= owner then return 0 end
if what == 'renew' then
  redis.call('HSET', KEYS[1], 'until', whole(now + tonumber(ARGV[4])))
elseif what == 'keep' then
  redis.call('HSET', KEYS[1], 'state', 'kept', 'answer', ARGV[5])
  redis.call('HDEL', KEYS[1], 'owner', 'until')
  redis.call('HSET', KEYS[3], ARGV[3], #ARGV[5])
  redis.call('HINCRBY', KEYS[3], 'total', #ARGV[5])
elseif what == 'release' then
  redis.call('DEL', KEYS[1])
  forget(ARGV[3])
end
return 1
