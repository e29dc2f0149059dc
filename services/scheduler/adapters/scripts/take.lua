-- Hand free slots out. ARGV from `at` on, for each offer: instance, version, slots, place, part (w, p or d), token us,
-- load us, handoff us, owner that the caller saw. Answers granted tickets.
local function read_offers(at)
  local all, names = {}, {}
  for i = at, #ARGV, 9 do
    all[#all + 1] = {instance = ARGV[i], version = ARGV[i + 1], slots = tonumber(ARGV[i + 2]), place = ARGV[i + 3],
                     part = ARGV[i + 4], token_us = tonumber(ARGV[i + 5]), load_us = tonumber(ARGV[i + 6]),
                     handoff_us = tonumber(ARGV[i + 7]), owner = ARGV[i + 8]}
    names[#names + 1] = ARGV[i]
  end
  local offers, waits, slots_of = {}, {}, {}
  if #all == 0 then return offers, waits, slots_of end
  local used, drains = call('HMGET', key('in_use'), unpack(names)), any_drains()
  local owners = call('EXISTS', key('owners')) == 1 and call('HMGET', key('owners'), unpack(names)) or {}
  for i, offer in ipairs(all) do
    if offer.part ~= 'p' then slots_of[offer.version] = (slots_of[offer.version] or 0) + offer.slots end
    if not waits[offer.version] then waits[offer.version] = waiting(offer.version) end
    local same_owner = (owners[i] or '') == offer.owner -- else it has changed hands since the caller looked
    if same_owner and waits[offer.version] > 0 and not (drains and drain_mark(offer.instance)) then
      offer.used = num(used[i])
      offers[#offers + 1] = offer
    end
  end
  return offers, waits, slots_of
end

local function least_loaded(offers, waits)
  local best
  for _, offer in ipairs(offers) do
    if offer.part ~= 'p' and offer.used < offer.slots and waits[offer.version] > 0 then
      if not best or offer.used * best.slots < best.used * offer.slots then best = offer end
    end
  end
  return best
end

local function occupy(offer)
  offer.used = call('HINCRBY', key('in_use'), offer.instance, 1)
  touch(offer.instance)
end

local function next_class(version, state, slots)
  local counts = {lane_waiting(1, version), lane_waiting(2, version), lane_waiting(3, version)}
  if counts[3] > 0 and overload(counts[1] + counts[2], num(state[5]), slots) > 0
    and now - oldest(3, version) < PAUSE then
    counts[3] = 0
  end
  local best, least
  local single = (counts[1] > 0 and 1 or 0) + (counts[2] > 0 and 1 or 0) + (counts[3] > 0 and 1 or 0) == 1
  for class = 1, 3 do
    if counts[class] > 0 then
      local urgency = single and 0 or num(state[1 + class]) - AGEING * math.max(0, now - oldest(class, version))
      if not best or urgency < least then best, least = class, urgency end
    end
  end
  return best
end

local function note_pace(paces, name, left)
  local pace = call('HMGET', paces, 'l:' .. name, 'a:' .. name)
  local last = num(pace[1])
  if last > 0 then
    call('HSET', paces, 'a:' .. name, int(moved(num(pace[2]), math.max(0, now - last))))
  end
  if left > 0 then
    call('HSET', paces, 'l:' .. name, int(now))
  elseif last > 0 then
    call('HDEL', paces, 'l:' .. name)
  end
end

local function note_scoped_paces(r)
  for scope in string.gmatch(r.sc or '', '%S+') do
    local name = scoped(r.tn, scope)
    note_pace(key('scoped'), name, num(call('HGET', key('scoped'), 'n:' .. name)))
  end
end

-- Charges the tenant that is next and its class; answers its attempt.
local function draw(version, slots)
  local state = call('HMGET', version_key(version), 'pf', 'p1', 'p2', 'p3', 'ra', 'ro', 'rn')
  local class = next_class(version, state, slots)
  local lane, accounts = tenants_key(class, version), accounts_key(class, version)
  local seat = call('ZRANGE', lane, 0, 0)[1]
  local tenant = string.sub(seat, 17)
  local first = call('ZRANGE', queue_key(class, version, tenant), 0, 1)
  local r = read(string.sub(first[1], 17))
  note_pace(key('pace'), tenant, unqueue(r, true)) -- its place in the lane is seen to below
  note_scoped_paces(r)
  local acc = account(class, version, tenant)
  r.un, r.ep = math.max(1, predicted(acc, num(state[6]), num(state[5]), r['in'], r.mo)), acc.epoch
  local turn, served = acc.turns + 1, acc.service + charge(r.un, r.we)
  call('HSET', accounts, 'floor', int(math.max(acc.floor, acc.service)), 'turns', int(turn),
       's:' .. tenant, int(served), 'g:' .. tenant, int(turn))
  call('ZREM', lane, seat)
  if first[2] then call('ZADD', lane, int(served), member(turn, tenant)) end
  local pass = num(state[1 + class])
  call('HSET', version_key(version), 'pf', int(math.max(num(state[1]), pass)),
       'p' .. class, int(pass + charge(r.un, SHARES[class])), 'rn', int(num(state[7]) + 1))
  return r
end

local function take(at, limit)
  local granted = {}
  local offers, waits, slots_of = read_offers(at)
  while #granted < limit do
    local offer = least_loaded(offers, waits)
    if not offer then break end
    local version = offer.version
    local r = draw(version, slots_of[version])
    waits[version] = waits[version] - 1
    local main, prefill = choose_seats(offers, version, r)
    occupy(main)
    if prefill then
      occupy(prefill)
      r.i2, r.p2 = prefill.instance, prefill.place
    end
    r.st, r.is, r.pc, r.gr, r.lx = 'granted', main.instance, main.place, now, now + LEASE
    write(r)
    call('ZADD', key('leases'), int(r.lx), r.id)
    call('ZADD', key('due'), int(now + RETRY), r.id)
    granted[#granted + 1] = ticket(r)
  end
  return granted
end
