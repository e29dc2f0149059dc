-- Renews the concurrency leases of one tenant's running requests. Only a request whose ticket is live has a lease: one
-- that was settled while this call was on its way must not come back. The ticket names the scopes beside the tenant's.
-- Their reservations of money are renewed with them.
-- KEYS: 1 leases  2 reservations of the budget  3.. tickets, one a request
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
    for scope in string.gmatch(ticket, '\n(%S+)') do
      local leases = scope == '-' and KEYS[1] or KEYS[1] .. ':' .. scope
      redis.call('ZADD', leases, ends, ARGV[index + 1])
      redis.call('PEXPIRE', leases, ARGV[2])
    end
    redis.call('ZADD', KEYS[2], 'XX', ends, ARGV[index + 1])
    redis.call('PEXPIRE', KEYS[index], ARGV[2])
    renewed = renewed + 1
  end
end
return renewed
