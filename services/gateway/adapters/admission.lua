-- Admits one request or refuses it, in one step: key alive, and the budgets and limits of the tenant, key and model.
-- The pure twin, with the reasons for the arithmetic, is services/gateway/domain/limits.py. Refused writes nothing.
-- KEYS (one tenant, one slot): 1 alive keys  2 ticket of this request  3 settlements, then for each scope: meters,
--       leases, budget. budget.lua is put before this.
-- ARGV: 1 key hash ("" = a token of an issuer)  2 when that token expires, ms (0 = never)  3 request id
--       4 tokens to reserve  5 lease ms  6 ticket ms  7 retry ms when only concurrency refuses
--       8 now ms ("" = the store's clock)  9 settlements to keep, then for each scope: its name ("" = the tenant),
--       requests/min, tokens/min, concurrent (each -1 = no limit), budget ("" = none: limit, most cost, field of what
--       is spent)
-- Returns {'taken', requests limit, left, reset ms, tokens limit, left, reset ms} of the scope with least left (limit -1 =
--         none), {'refused', limit name, retry ms (-1 = never fits), scope number}, {'key'}, {'ended'} or
--         {'budget', spent, reserved, scope number}, the first two in micro-units. Scope numbers begin at 0.
-- A line of the ticket for each scope: name ("-" = the tenant), token points, tokens/min, request points, requests/min,
-- 1 if it has a budget.
local POINTS, FIXED, KEYS_FIXED, EACH, KEYS_EACH = 60000, 9, 3, 5, 3

local function whole(number) return string.format('%.0f', number) end

local now = tonumber(ARGV[8])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local expires = ARGV[2]
if ARGV[1] ~= '' then expires = redis.call('HGET', KEYS[1], ARGV[1]) end
if not expires or (expires ~= '0' and tonumber(expires) <= now) then
  return {'key'}
end

local ticket = redis.call('GET', KEYS[2])
if ticket == 'ended' then
  return {'ended'}
end
if ticket then -- a repeated call gets the first answer
  local part = {}
  for text in string.gmatch(string.match(ticket, '^[^\n]*'), '%S+') do part[#part + 1] = tonumber(text) end
  return {'taken', part[3], part[4], part[5], part[6], part[7], part[8]}
end

local last = (#ARGV - FIXED) / EACH - 1
local budgets = {}
for number = 0, last do
  local budget = budget_asked(KEYS[KEYS_FIXED + number * KEYS_EACH + 3], ARGV[FIXED + number * EACH + 5], now)
  if budget_refuses(budget) then
    return {'budget', whole(budget.spent), whole(budget.reserved), number}
  end
  budgets[number] = budget
end

local reserve = tonumber(ARGV[4])
local worst_name, worst_wait, worst_scope = nil, 0, 0
local function refuse(scope, name, wait) -- -1 (never) beats every wait; else the longest; the first of equals
  if not worst_name or (worst_wait ~= -1 and (wait == -1 or wait > worst_wait)) then
    worst_name, worst_wait, worst_scope = name, wait, scope
  end
end
local function drained(points, at, rate)
  points, at = tonumber(points) or 0, tonumber(at) or 0
  return math.max(0, points - math.max(0, rate) * math.max(0, now - at)), math.max(at, now)
end
local function check_rate(scope, name, points, rate, units)
  if rate < 0 or units == 0 then return end -- what takes nothing of a limit is not refused by it
  local cost, capacity = units * POINTS, rate * POINTS
  if cost > capacity then
    refuse(scope, name, -1)
  elseif points + cost > capacity then
    refuse(scope, name, math.ceil((points + cost - capacity) / rate))
  end
end

local scopes = {}
for number = 0, last do
  local at, keys_at = FIXED + number * EACH, KEYS_FIXED + number * KEYS_EACH
  local scope = {
    name = ARGV[at + 1], meters = KEYS[keys_at + 1], leases = KEYS[keys_at + 2],
    budget = budgets[number], purse = KEYS[keys_at + 3],
    requests = tonumber(ARGV[at + 2]), tokens = tonumber(ARGV[at + 3]), concurrent = tonumber(ARGV[at + 4]),
  }
  local stored = redis.call('HMGET', scope.meters, 'requests', 'requests_at', 'tokens', 'tokens_at')
  scope.request_points, scope.request_at = drained(stored[1], stored[2], scope.requests)
  scope.token_points, scope.token_at = drained(stored[3], stored[4], scope.tokens)
  check_rate(number, 'requests_per_minute', scope.request_points, scope.requests, 1)
  check_rate(number, 'tokens_per_minute', scope.token_points, scope.tokens, reserve)
  if scope.concurrent >= 0
      and redis.call('ZCOUNT', scope.leases, '(' .. whole(now), '+inf') >= scope.concurrent then
    refuse(number, 'concurrent_requests', scope.concurrent > 0 and tonumber(ARGV[7]) or -1)
  end
  scopes[#scopes + 1] = scope
end
if worst_name then
  return {'refused', worst_name, worst_wait, worst_scope}
end

local drain_ms
local function charge(scope, name, points, at, rate, units) -- returns remaining units, ms until the meter is empty
  if rate < 0 then return -1, 0 end
  points = points + units * POINTS
  redis.call('HSET', scope.meters, name, whole(points), name .. '_at', whole(at))
  local reset = rate > 0 and math.ceil(points / rate) or 0
  drain_ms = math.max(drain_ms, reset)
  return math.floor(math.max(0, rate * POINTS - points) / POINTS), reset
end
local least = {requests = {-1, -1, 0}, tokens = {-1, -1, 0}}
local function remember(what, rate, left, reset) -- the scope with least left is what the caller is told of
  if rate >= 0 and (least[what][1] < 0 or left < least[what][2]) then least[what] = {rate, left, reset} end
end
local lines = {}
for _, scope in ipairs(scopes) do
  drain_ms = 0
  local left, reset = charge(scope, 'requests', scope.request_points, scope.request_at, scope.requests, 1)
  remember('requests', scope.requests, left, reset)
  left, reset = charge(scope, 'tokens', scope.token_points, scope.token_at, scope.tokens, reserve)
  remember('tokens', scope.tokens, left, reset)
  if scope.requests >= 0 or scope.tokens >= 0 then -- an empty meter need not be kept; a minute for a clock that steps back
    redis.call('PEXPIRE', scope.meters, math.max(drain_ms + 60000, redis.call('PTTL', scope.meters)))
  end
  if scope.name == '' then -- nobody settled these
    for _, id in ipairs(redis.call('ZRANGE', scope.leases, '-inf', whole(now), 'BYSCORE')) do
      redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[9], '*', 'r', id, 'k', 'l', 't', '0')
    end
  end
  redis.call('ZREMRANGEBYSCORE', scope.leases, '-inf', whole(now))
  redis.call('ZADD', scope.leases, whole(now + tonumber(ARGV[5])), ARGV[3])
  redis.call('PEXPIRE', scope.leases, ARGV[6])
  lines[#lines + 1] = table.concat({scope.name == '' and '-' or scope.name, whole(scope.token_points),
    whole(scope.tokens), whole(scope.request_points), whole(scope.requests), scope.budget and 1 or 0}, ' ')
  if scope.budget and scope.budget.cost > 0 then
    budget_change(scope.purse, ARGV[3], scope.budget.cost, now + tonumber(ARGV[5]))
  end
end
local r, t = least.requests, least.tokens
local first = {reserve, now, r[1], r[2], r[3], t[1], t[2], t[3]}
for index, part in ipairs(first) do first[index] = whole(part) end
redis.call('SET', KEYS[2], table.concat(first, ' ') .. '\n' .. table.concat(lines, '\n'), 'PX', ARGV[6])
return {'taken', r[1], r[2], r[3], t[1], t[2], t[3]}
