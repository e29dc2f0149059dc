-- The money of one scope (a tenant, one of its keys, or a model for it), put before the scripts that admit and settle. Keys: roundhouse/budgets.py.
-- Invariant: `reserved` is the sum of `:amounts`, whose members are those of `:holds`. The pure twin is
-- services/gateway/domain/budgets.py (Purse).
local PURGED_MAX = 200 -- reservations of dead gateways that one call gives back; the next call goes on

local function budget_change(key, id, amount, ends) -- amount 0 = the reservation ends
  local holds, amounts = key .. ':holds', key .. ':amounts'
  local before = tonumber(redis.call('HGET', amounts, id) or '0')
  if amount > 0 then
    redis.call('HSET', amounts, id, string.format('%.0f', amount))
    redis.call('ZADD', holds, string.format('%.0f', ends), id)
  else
    redis.call('HDEL', amounts, id)
    redis.call('ZREM', holds, id)
  end
  redis.call('HINCRBY', key, 'reserved', string.format('%.0f', amount - before))
  if redis.call('EXISTS', holds) == 0 then redis.call('HDEL', key, 'reserved') end
end

-- `ask` is '' or "limit cost field"; answers nil or {limit, cost, spent, reserved}, all in micro-units.
local function budget_asked(key, ask, now)
  if ask == '' then return nil end
  local limit, cost, field = string.match(ask, '^(%S+) (%S+) (%S+)$')
  local over = redis.call('ZRANGE', key .. ':holds', '-inf', string.format('%.0f', now), 'BYSCORE', 'LIMIT', 0, PURGED_MAX)
  for _, id in ipairs(over) do budget_change(key, id, 0, 0) end
  local stored = redis.call('HMGET', key, field, 'reserved')
  return {
    limit = tonumber(limit), cost = tonumber(cost),
    spent = tonumber(stored[1] or '0'), reserved = tonumber(stored[2] or '0'),
  }
end

local function budget_refuses(asked)
  return asked ~= nil and asked.spent + asked.reserved + asked.cost > asked.limit
end
