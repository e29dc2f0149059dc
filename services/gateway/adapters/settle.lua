-- Ends an admission: charges what was used instead of what was reserved and gives the concurrency leases back.
-- The pure twin is services/gateway/domain/limits.py (settle, withdraw). A second call changes nothing.
-- KEYS: 1 meters  2 leases  3 ticket of this request  4 budget  5 settlements; 1, 2 and 4 the tenant's. The ticket names
--       the other scopes, whose keys are these with ":scope" behind and so in the same slot. budget.lua is put before.
-- ARGV: 1 request id  2 tokens used  3 "1" = withdraw: the request itself is given back too, and an admission that is
--       still on its way will find itself ended  4 ms to remember that it ended  5 now ms ("" = the store's clock)
--       6 costs in micro-units: "scope cost" for each scope with a budget ("-" = the tenant)  7 ms to hold that cost until the ledger has it  8 settlements to keep  9 ms to keep them
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

local reserved_text, at_text = string.match(ticket, '^(%S+) (%S+)')
local used, reserved = tonumber(ARGV[2]) * POINTS, tonumber(reserved_text) * POINTS
local elapsed = math.max(0, now - tonumber(at_text))

local function change(meters, name, rate, points_more)
  local stored = redis.call('HMGET', meters, name, name .. '_at')
  local points, since = tonumber(stored[1]) or 0, tonumber(stored[2]) or 0
  points = math.max(0, points - rate * math.max(0, now - since))
  points = math.max(0, points + points_more)
  redis.call('HSET', meters, name, whole(points), name .. '_at', whole(math.max(since, now)))
  local keep_ms = (rate > 0 and math.ceil(points / rate) or 0) + 60000
  redis.call('PEXPIRE', meters, math.max(keep_ms, redis.call('PTTL', meters)))
end

local function give_back(before, cost, kept, rate)
  return math.max(0, before + cost - math.max(rate * elapsed, before + kept))
end

local costs = {}
for scope, cost in string.gmatch(ARGV[6], '(%S+) (%S+)') do costs[scope] = tonumber(cost) end

for scope, token_before, token_rate, request_before, request_rate, has_budget in
    string.gmatch(ticket, '\n(%S+) (%S+) (%S+) (%S+) (%S+) (%S+)') do
  local suffix = scope == '-' and '' or ':' .. scope
  local meters = KEYS[1] .. suffix
  token_rate, request_rate = tonumber(token_rate), tonumber(request_rate)
  if suffix ~= '' then redis.call('ZREM', KEYS[2] .. suffix, ARGV[1]) end
  if token_rate >= 0 then
    if used >= reserved then
      change(meters, 'tokens', token_rate, used - reserved)
    else
      change(meters, 'tokens', token_rate, -give_back(tonumber(token_before), reserved, used, token_rate))
    end
  end
  if ARGV[3] == '1' and request_rate >= 0 then
    change(meters, 'requests', request_rate, -give_back(tonumber(request_before), POINTS, 0, request_rate))
  end
  local purse = KEYS[4] .. suffix
  if has_budget == '1' and redis.call('HEXISTS', purse .. ':amounts', ARGV[1]) == 1 then -- else the ledger has it already
    budget_change(purse, ARGV[1], ARGV[3] == '1' and 0 or costs[scope] or 0, now + tonumber(ARGV[7]))
  end
end
redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[8], '*', 'r', ARGV[1], 'k', ARGV[3] == '1' and 'w' or 's', 't', ARGV[2])
redis.call('PEXPIRE', KEYS[5], ARGV[9])
redis.call('SET', KEYS[3], 'ended', 'PX', ARGV[4])
return 1
