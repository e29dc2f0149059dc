-- Replaces the catalogue if the generation it was made from is still the stored one. One key, so one slot.
-- KEYS[1] the catalogue hash
-- ARGV[1] expected generation   ARGV[2] new generation   ARGV[3] version token   ARGV[4] data
-- Returns {1, new generation} or {0, stored generation} with nothing changed.
local stored = redis.call('HGET', KEYS[1], 'generation') or '0'
if stored ~= ARGV[1] then
  return {0, tonumber(stored)}
end
redis.call('HSET', KEYS[1], 'generation', ARGV[2], 'token', ARGV[3], 'data', ARGV[4])
return {1, tonumber(ARGV[2])}
