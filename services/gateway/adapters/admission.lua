-- Admits one request or refuses it, in one step: key alive, budget, requests and tokens a minute, concurrency lease.
-- The pure twin, with the reasons for the arithmetic, is services/gateway/domain/limits.py. Refused writes nothing.
-- KEYS (one tenant, one slot): 1 alive keys  2 meters  3 leases  4 ticket of this request  5 budget mark
-- ARGV: 1 key hash  2 request id  3 requests/min  4 tokens/min  5 concurrent (each -1 = no limit)  6 tokens to reserve
--       7 lease ms  8 ticket ms  9 retry ms when only concurrency refuses  10 now ms ("" = the store's clock)
-- Returns {'taken', remaining requests, remaining tokens, reset requests ms, reset tokens ms} (remaining -1 = no limit),
--         {'refused', limit name, retry ms (-1 = never fits)}, {'key'}, {'budget'} or {'ended'}.
local POINTS = 60000

local function whole(number) return string.format('%.0f', number) end

local now = tonumber(ARGV[10])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local key_expires = redis.call('HGET', KEYS[1], ARGV[1])
if not key_expires or (key_expires ~= '0' and tonumber(key_expires) <= now) then
  return {'key'}
end

local ticket = redis.call('GET', KEYS[4])
if ticket == 'ended' then
  return {'ended'}
end
if ticket then -- a repeated call gets the first answer
  local part = {}
  for text in string.gmatch(ticket, '%S+') do part[#part + 1] = tonumber(text) end
  return {'taken', part[7], part[8], part[9], part[10]}
end

if redis.call('EXISTS', KEYS[5]) == 1 then
  return {'budget'}
end

local request_rate, token_rate, concurrent = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local reserve = tonumber(ARGV[6])
local stored = redis.call('HMGET', KEYS[2], 'requests', 'requests_at', 'tokens', 'tokens_at')

local function drained(points, at, rate)
  points, at = tonumber(points) or 0, tonumber(at) or 0
  return math.max(0, points - math.max(0, rate) * math.max(0, now - at)), math.max(at, now)
end
local request_points, request_at = drained(stored[1], stored[2], request_rate)
local token_points, token_at = drained(stored[3], stored[4], token_rate)

local worst_name, worst_wait = nil, 0
local function refuse(name, wait) -- -1 (never) beats every wait; else the longest; the first of equals
  if not worst_name or (worst_wait ~= -1 and (wait == -1 or wait > worst_wait)) then
    worst_name, worst_wait = name, wait
  end
end
local function check_rate(name, points, rate, units)
  if rate < 0 or units == 0 then return end -- what takes nothing of a limit is not refused by it
  local cost, capacity = units * POINTS, rate * POINTS
  if cost > capacity then
    refuse(name, -1)
  elseif points + cost > capacity then
    refuse(name, math.ceil((points + cost - capacity) / rate))
  end
end
check_rate('requests_per_minute', request_points, request_rate, 1)
check_rate('tokens_per_minute', token_points, token_rate, reserve)
if concurrent >= 0 and redis.call('ZCOUNT', KEYS[3], '(' .. whole(now), '+inf') >= concurrent then
  refuse('concurrent_requests', concurrent > 0 and tonumber(ARGV[9]) or -1)
end
if worst_name then
  return {'refused', worst_name, worst_wait}
end

local drain_ms = 0
local function charge(name, points, at, rate, units) -- returns remaining units, ms until the meter is empty
  if rate < 0 then return -1, 0 end
  points = points + units * POINTS
  redis.call('HSET', KEYS[2], name, whole(points), name .. '_at', whole(at))
  local reset = rate > 0 and math.ceil(points / rate) or 0
  drain_ms = math.max(drain_ms, reset)
  return math.floor(math.max(0, rate * POINTS - points) / POINTS), reset
end
local left_requests, reset_requests = charge('requests', request_points, request_at, request_rate, 1)
local left_tokens, reset_tokens = charge('tokens', token_points, token_at, token_rate, reserve)
if request_rate >= 0 or token_rate >= 0 then -- an empty meter need not be kept; a minute more for a clock that steps back
  redis.call('PEXPIRE', KEYS[2], math.max(drain_ms + 60000, redis.call('PTTL', KEYS[2])))
end

redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', whole(now))
redis.call('ZADD', KEYS[3], whole(now + tonumber(ARGV[7])), ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[8])
local parts = {reserve, now, token_points, token_rate, request_points, request_rate,
               left_requests, left_tokens, reset_requests, reset_tokens}
for index, part in ipairs(parts) do parts[index] = whole(part) end
redis.call('SET', KEYS[4], table.concat(parts, ' '), 'PX', ARGV[8])
return {'taken', left_requests, left_tokens, reset_requests, reset_tokens}
