-- ARGV: 3 limit, then for each offer: instance, version, slots, place, part (w, p or d), token us, load us, handoff us.
-- Answers {granted tickets, refused tickets}.
if is_stale() then return STALE end
local limit = tonumber(ARGV[3])
local refused, granted, offers = refuse_overdue(), {}, {}
local waits, slots_of = {}, {}
for i = 4, #ARGV, 8 do
  local offer = {instance = ARGV[i], version = ARGV[i + 1], slots = tonumber(ARGV[i + 2]), place = ARGV[i + 3],
                 part = ARGV[i + 4], token_us = tonumber(ARGV[i + 5]), load_us = tonumber(ARGV[i + 6]),
                 handoff_us = tonumber(ARGV[i + 7])}
  if offer.part ~= 'p' then slots_of[offer.version] = (slots_of[offer.version] or 0) + offer.slots end
  if not waits[offer.version] then waits[offer.version] = waiting(offer.version) end
  if waits[offer.version] > 0 and not drain_mark(offer.instance) then
    offer.used = num(call('HGET', key('in_use'), offer.instance))
    offers[#offers + 1] = offer
  end
end

local function least_loaded()
  local best
  for _, offer in ipairs(offers) do
    if offer.part ~= 'p' and offer.used < offer.slots and waits[offer.version] > 0 then
      if not best or offer.used * best.slots < best.used * offer.slots then best = offer end
    end
  end
  return best
end

-- Seats: services/scheduler/domain/seats.py
local function warm_tokens(text) -- "<tokens>|<length of instance>|<instance>" again and again
  local found, at = {}, 1
  while at <= #text do
    local cached, length, from = string.match(text, '^(%d+)|(%d+)|()', at)
    at = from + tonumber(length)
    found[string.sub(text, from, at - 1)] = tonumber(cached)
  end
  return found
end

local function choose_seats(version, r)
  local warm = warm_tokens(r.wa)
  local function crowd(offer) return floor(offer.used * offer.load_us / offer.slots) end
  local function first_token(offer)
    return math.max(0, r['in'] - (warm[offer.instance] or 0)) * offer.token_us + crowd(offer)
  end
  local function handed_over(offer) return first_token(offer) + offer.handoff_us end
  local function best_of(is_part, us)
    local best, least
    for _, offer in ipairs(offers) do
      if offer.version == version and offer.used < offer.slots and is_part(offer.part) then
        local time = us(offer)
        if not best or time < least or (time == least and offer.used * best.slots < best.used * offer.slots) then
          best, least = offer, time
        end
      end
    end
    return best, least
  end
  local whole, whole_us = best_of(function(part) return part ~= 'p' end, first_token)
  local prefill, prefill_us = best_of(function(part) return part == 'p' end, handed_over)
  local decode, decode_us = best_of(function(part) return part == 'd' end, crowd)
  if prefill and decode and prefill_us + decode_us < whole_us then return decode, prefill end
  return whole, nil
end

local function occupy(offer)
  offer.used = call('HINCRBY', key('in_use'), offer.instance, 1)
  call('ZADD', key('used'), int(now), offer.instance)
end

local function next_class(version, state)
  local best, least
  local counts = {lane_waiting(1, version), lane_waiting(2, version), lane_waiting(3, version)}
  if counts[3] > 0 and overload(counts[1] + counts[2], num(state[5]), slots_of[version]) > 0
    and now - oldest(3, version) < PAUSE then
    counts[3] = 0
  end
  for class = 1, 3 do
    if counts[class] > 0 then
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
  if call('HEXISTS', key('queued'), 'n:' .. tenant) == 1 then
    call('HSET', key('pace'), 'l:' .. tenant, int(now))
  elseif last > 0 then
    call('HDEL', key('pace'), 'l:' .. tenant)
  end
end

while #granted < limit do
  local offer = least_loaded()
  if not offer then break end
  local version = offer.version
  local state = call('HMGET', version_key(version), 'pf', 'p1', 'p2', 'p3', 'ra', 'ro')
  local class = next_class(version, state)
  local lane = tenants_key(class, version)
  local seat = call('ZRANGE', lane, 0, 0)[1]
  local tenant = string.sub(seat, 17)
  local first = call('ZRANGE', queue_key(class, version, tenant), 0, 0)[1]
  local r = read(string.sub(first, 17))
  unqueue(r)
  waits[version] = waits[version] - 1
  local acc = account(class, version, tenant)
  local units = math.max(1, predicted(acc, num(state[6]), num(state[5]), r['in'], r.mo))
  local accounts = accounts_key(class, version)
  local head = call('HMGET', accounts, 'floor', 'turns')
  local turn, served = num(head[2]) + 1, acc.service + charge(units, r.we)
  call('HSET', accounts, 'floor', int(math.max(num(head[1]), acc.service)), 'turns', int(turn), 's:' .. tenant, int(served),
       'g:' .. tenant, int(turn))
  if call('ZREM', lane, seat) == 1 then call('ZADD', lane, int(served), member(turn, tenant)) end
  local pass = num(state[1 + class])
  call('HSET', version_key(version), 'pf', int(math.max(num(state[1]), pass)),
       'p' .. class, int(pass + charge(units, SHARES[class])))
  call('HINCRBY', version_key(version), 'rn', 1)
  local main, prefill = choose_seats(version, r)
  occupy(main)
  if prefill then
    occupy(prefill)
    r.i2, r.p2 = prefill.instance, prefill.place
    call('HSET', request_key(r.id), 'i2', r.i2, 'p2', r.p2)
  end
  note_pace(tenant)
  r.st, r.is, r.pc, r.gr, r.lx, r.un, r.ep = 'granted', main.instance, main.place, now, now + LEASE, units, acc.epoch
  call('HSET', request_key(r.id), 'st', r.st, 'is', r.is, 'pc', r.pc, 'gr', int(r.gr), 'lx', int(r.lx),
       'un', int(units), 'ep', int(r.ep))
  call('ZADD', key('leases'), int(r.lx), r.id)
  call('ZADD', key('due'), int(now + RETRY), r.id)
  granted[#granted + 1] = ticket(r)
end
return {granted, refused}
