-- Says what a tenant has spent as of a ledger row. Absolute sums and a rising sequence: repeated or late calls, of any
-- number of processes, change nothing. Requests that are in these sums give their reservations back in the same step.
-- KEYS: 1 the tenant's budget (roundhouse/budgets.py); ":holds" and ":amounts" behind it are in the same slot.
-- ARGV: 1 sequence  2 ms to keep  3 number of periods, then for each: field, micro-units
--       then for each counted request: sequence of its row, request id
-- Returns the sequence that the store has now.
local stored = tonumber(redis.call('HGET', KEYS[1], 'sequence') or '0')
local sequence = tonumber(ARGV[1])
if sequence <= stored then return stored end

local known = redis.call('HKEYS', KEYS[1])
local periods, after = {}, 4 + 2 * tonumber(ARGV[3])
for at = 4, after - 1, 2 do
  periods[ARGV[at]] = true
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
end
for _, field in ipairs(known) do -- of periods that are over
  if string.sub(field, 1, 6) == 'spent:' and not periods[field] then redis.call('HDEL', KEYS[1], field) end
end
redis.call('HSET', KEYS[1], 'sequence', ARGV[1])

local holds, amounts = KEYS[1] .. ':holds', KEYS[1] .. ':amounts'
for at = after, #ARGV, 2 do
  local id = ARGV[at + 1]
  if tonumber(ARGV[at]) > stored and redis.call('ZREM', holds, id) == 1 then
    redis.call('HINCRBY', KEYS[1], 'reserved', -tonumber(redis.call('HGET', amounts, id) or '0'))
    redis.call('HDEL', amounts, id)
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return sequence
