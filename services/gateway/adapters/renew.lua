-- Renews the concurrency leases of one tenant's running requests. Only a request whose ticket is live has a lease: one
-- that was settled while this call was on its way must not come back. The ticket names the scopes beside the tenant's.
-- Their reservations of money are renewed with them.
-- KEYS: 1 leases  2 budget (both the tenant's)  3.. tickets, one a request
-- ARGV: 1 lease ms  2 ticket ms  3 now ms ("" = the store's clock)  4.. request ids, in the order of the tickets
-- Returns how many were renewed.
local now = tonumber(ARGV[3])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end
local ends, renewed = string.format('%.0f', now + tonumber(ARGV[1])), 0
for index = 3, #KEYS do
  local ticket = redis.call('GET', KEYS[index])
  if ticket and ticket ~= 'ended' then
    for scope, has_budget in string.gmatch(ticket, '\n(%S+) %S+ %S+ %S+ %S+ (%S+)') do
      local suffix = scope == '-' and '' or ':' .. scope
      redis.call('ZADD', KEYS[1] .. suffix, ends, ARGV[index + 1])
      redis.call('PEXPIRE', KEYS[1] .. suffix, ARGV[2])
      if has_budget == '1' then redis.call('ZADD', KEYS[2] .. suffix .. ':holds', 'XX', ends, ARGV[index + 1]) end
    end
    redis.call('PEXPIRE', KEYS[index], ARGV[2])
    renewed = renewed + 1
  end
end
return renewed
