-- ARGV: 3 limit, then for each offer: instance, version, slots, place.
-- Answers {granted tickets, refused tickets}.
local limit = tonumber(ARGV[3])
local refused, granted, offers = refuse_overdue(), {}, {}
local waits = {}
for i = 4, #ARGV, 4 do
  local offer = {instance = ARGV[i], version = ARGV[i + 1], slots = tonumber(ARGV[i + 2]), place = ARGV[i + 3]}
  if not waits[offer.version] then waits[offer.version] = waiting(offer.version) end
  if waits[offer.version] > 0 and not drain_mark(offer.instance) then
    offer.used = num(call('HGET', key('in_use'), offer.instance))
    offers[#offers + 1] = offer
  end
end

local function least_loaded()
  local best
  for _, offer in ipairs(offers) do
    if offer.used < offer.slots and waits[offer.version] > 0 then
      if not best or offer.used * best.slots < best.used * offer.slots then best = offer end
    end
  end
  return best
end

local function next_class(version, state)
  local best, least
  for class = 1, 3 do
    if lane_waiting(class, version) > 0 then
      local urgency = num(state[1 + class]) - AGEING * math.max(0, now - oldest(class, version))
      if not best or urgency < least then best, least = class, urgency end
    end
  end
  return best
end

local function note_pace(tenant)
  local pace = call('HMGET', key('pace'), 'l:' .. tenant, 'a:' .. tenant)
  local last = num(pace[1])
  if last > 0 then
    call('HSET', key('pace'), 'a:' .. tenant, int(moved(num(pace[2]), math.max(0, now - last))))
  end
  if call('HEXISTS', key('queued'), tenant) == 1 then
    call('HSET', key('pace'), 'l:' .. tenant, int(now))
  elseif last > 0 then
    call('HDEL', key('pace'), 'l:' .. tenant)
  end
end

while #granted < limit do
  local offer = least_loaded()
  if not offer then break end
  local version = offer.version
  local state = call('HMGET', version_key(version), 'pf', 'p1', 'p2', 'p3')
  local class = next_class(version, state)
  local tenant = call('ZRANGE', tenants_key(class, version), 0, 0)[1]
  local first = call('ZRANGE', queue_key(class, version, tenant), 0, 0)[1]
  local r = read(string.sub(first, 17))
  unqueue(r)
  waits[version] = waits[version] - 1
  local acc = account(class, version, tenant)
  local units = math.max(1, cost(r['in'], 0, predicted(acc.output, r.mo)))
  local accounts = accounts_key(class, version)
  if acc.service > num(call('HGET', accounts, 'floor')) then call('HSET', accounts, 'floor', int(acc.service)) end
  set_service(class, version, tenant, acc.service + charge(units, r.we))
  local pass = num(state[1 + class])
  call('HSET', version_key(version), 'pf', int(math.max(num(state[1]), pass)),
       'p' .. class, int(pass + charge(units, SHARES[class])))
  call('HINCRBY', version_key(version), 'rn', 1)
  offer.used = call('HINCRBY', key('in_use'), offer.instance, 1)
  call('ZADD', key('used'), int(now), offer.instance)
  note_pace(tenant)
  r.st, r.is, r.pc, r.gr, r.lx, r.un, r.ep = 'granted', offer.instance, offer.place, now, now + LEASE, units, acc.epoch
  call('HSET', request_key(r.id), 'st', r.st, 'is', r.is, 'pc', r.pc, 'gr', int(r.gr), 'lx', int(r.lx),
       'un', int(units), 'ep', int(r.ep))
  call('ZADD', key('leases'), int(r.lx), r.id)
  call('ZADD', key('due'), int(now + RETRY), r.id)
  granted[#granted + 1] = ticket(r)
end
return {granted, refused}
