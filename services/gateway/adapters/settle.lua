-- Ends an admission: charges what was used instead of what was reserved and gives the concurrency lease back.
-- The pure twin is services/gateway/domain/limits.py (settle, withdraw). A second call changes nothing.
-- KEYS: 1 meters  2 leases  3 ticket of this request
-- ARGV: 1 request id  2 tokens used  3 "1" = withdraw: the request itself is given back too, and an admission that is
--       still on its way will find itself ended  4 ms to remember that it ended  5 now ms ("" = the store's clock)
-- Returns 1 if this call ended it, else 0.
local POINTS = 60000

local function whole(number) return string.format('%.0f', number) end

local now = tonumber(ARGV[5])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

redis.call('ZREM', KEYS[2], ARGV[1])
local ticket = redis.call('GET', KEYS[3])
if ticket == 'ended' then
  return 0
end
if not ticket then
  if ARGV[3] == '1' then redis.call('SET', KEYS[3], 'ended', 'PX', ARGV[4]) end
  return 0
end

local part = {}
for text in string.gmatch(ticket, '%S+') do part[#part + 1] = tonumber(text) end
local reserve, at, token_before, token_rate, request_before, request_rate =
  part[1], part[2], part[3], part[4], part[5], part[6]
local elapsed = math.max(0, now - at)

local function change(name, rate, points_more)
  local stored = redis.call('HMGET', KEYS[1], name, name .. '_at')
  local points, since = tonumber(stored[1]) or 0, tonumber(stored[2]) or 0
  points = math.max(0, points - rate * math.max(0, now - since))
  points = math.max(0, points + points_more)
  redis.call('HSET', KEYS[1], name, whole(points), name .. '_at', whole(math.max(since, now)))
  local keep_ms = (rate > 0 and math.ceil(points / rate) or 0) + 60000
  redis.call('PEXPIRE', KEYS[1], math.max(keep_ms, redis.call('PTTL', KEYS[1])))
end

local function give_back(before, cost, kept, rate)
  return math.max(0, before + cost - math.max(rate * elapsed, before + kept))
end

if token_rate >= 0 then
  local used, reserved = tonumber(ARGV[2]) * POINTS, reserve * POINTS
  if used >= reserved then
    change('tokens', token_rate, used - reserved)
  else
    change('tokens', token_rate, -give_back(token_before, reserved, used, token_rate))
  end
end
if ARGV[3] == '1' and request_rate >= 0 then
  change('requests', request_rate, -give_back(request_before, POINTS, 0, request_rate))
end
redis.call('SET', KEYS[3], 'ended', 'PX', ARGV[4])
return 1
