-- Notes the record of a key and whether it is alive, in one step.
-- KEYS (one tenant, one slot): 1 records  2 alive keys
-- ARGV: 1 key id  2 record  3 key hash  4 when it expires, ms ("0" = never; "" = it is dead)
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[2], ARGV[3])
else
  redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
end
return 1
