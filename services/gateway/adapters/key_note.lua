-- Notes the record of a key and whether it is alive, in one step. What was revoked never lives again (case B06).
-- KEYS (one tenant, one slot): 1 records  2 alive keys
-- ARGV: 1 key id  2 record  3 key hash  4 when it expires, ms ("0" = never; "" = it is dead)
-- Returns 1, or 0 if the key was revoked before and is to live: then nothing is noted.
local before = redis.call('HGET', KEYS[1], ARGV[1])
if before and ARGV[4] ~= '' and (cjson.decode(before).revoked_ms or 0) ~= 0 then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[2], ARGV[3])
else
  redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
end
return 1
