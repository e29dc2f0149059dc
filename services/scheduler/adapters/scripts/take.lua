-- Hand free slots out. ARGV from `at` on, for each offer: instance, version, slots, place, part (w, p or d), token us,
-- load us, handoff us, owner that the caller saw. Answers granted tickets.
function q.read_offers(at)
  local all = {}
  for i = at, #ARGV, 9 do
    all[#all + 1] = {instance = ARGV[i], version = ARGV[i + 1], slots = tonumber(ARGV[i + 2]), place = ARGV[i + 3],
                     part = ARGV[i + 4], token_us = tonumber(ARGV[i + 5]), load_us = tonumber(ARGV[i + 6]),
                     handoff_us = tonumber(ARGV[i + 7]), owner = ARGV[i + 8]}
  end
  local offers, waits, slots_of, wanted = {}, {}, {}, {}
  for _, offer in ipairs(all) do
    if offer.part ~= 'p' then slots_of[offer.version] = (slots_of[offer.version] or 0) + offer.slots end
    if not waits[offer.version] then waits[offer.version] = q.waiting(q.version_of(offer.version)) end
    if waits[offer.version] > 0 then wanted[#wanted + 1] = offer.instance end
  end
  if #wanted == 0 then return offers, waits, slots_of end
  q.read_uses(wanted)
  local owned, drains = q.any('owners'), q.any('drains')
  for _, offer in ipairs(all) do
    if waits[offer.version] > 0 then
      local owner = owned and call('HGET', q.key('owners'), offer.instance) or ''
      local same_owner = owner == offer.owner -- else it has changed hands since the caller looked
      if same_owner and not (drains and q.drain_mark(offer.instance)) then
        offer.used = q.uses[offer.instance]
        offers[#offers + 1] = offer
      end
    end
  end
  return offers, waits, slots_of
end

function q.least_loaded(offers, waits)
  local best
  for _, offer in ipairs(offers) do
    if offer.part ~= 'p' and offer.used < offer.slots and waits[offer.version] > 0 then
      if not best or offer.used * best.slots < best.used * offer.slots then best = offer end
    end
  end
  return best
end

function q.occupy(offer)
  q.use(offer.instance, 1)
  offer.used = q.uses[offer.instance]
end

function q.next_class(v, slots)
  local counts = {v.waiting[1], v.waiting[2], v.waiting[3]}
  if counts[3] > 0 and q.overload(v, slots) > 0 and now - q.oldest(q.lane_of(v, 3)) < P.PAUSE then counts[3] = 0 end
  local best, least
  local single = (counts[1] > 0 and 1 or 0) + (counts[2] > 0 and 1 or 0) + (counts[3] > 0 and 1 or 0) == 1
  for class = 1, 3 do
    if counts[class] > 0 then
      local urgency = single and 0 or v.pass[class] - P.AGEING * max(0, now - q.oldest(q.lane_of(v, class)))
      if not best or urgency < least then best, least = class, urgency end
    end
  end
  return best
end

function q.note_pace(family, name)
  local depth = q.depth_of(family, name)
  if depth.last > 0 then depth.pace = q.moved(depth.pace, max(0, now - depth.last)) end
  depth.last, depth.changed = depth.count > 0 and now or 0, true
end

-- Charges the tenant that is next and its class; answers its attempt.
function q.draw(v, slots)
  local class = q.next_class(v, slots)
  local lane = q.lane_of(v, class)
  local tenant = string.sub(call('ZPOPMIN', lane.seats)[1], 17)
  local r = q.read(string.sub(call('ZPOPMIN', lane.queues .. tenant)[1], 17))
  local acc = q.account(lane, tenant)
  q.stop_waiting(r, lane, acc)
  q.note_pace('queued', tenant)
  for scope in string.gmatch(r.sc, '%S+') do q.note_pace('scoped', q.scoped(tenant, scope)) end
  r.un, r.ep = max(1, q.predicted(acc, v, r['in'], r.mo)), acc.epoch
  q.change_class(v, 'floor', class, max(v.floor[class], acc.service))
  q.change_class(v, 'turns', class, v.turns[class] + 1)
  acc.service, acc.turn, acc.changed = acc.service + q.charge(r.un, r.we), v.turns[class], true
  if acc.own > 0 then call('ZADD', lane.seats, acc.service, q.member(acc.turn, tenant)) end
  q.change(v, 'pass_floor', max(v.pass_floor, v.pass[class]))
  q.change_class(v, 'pass', class, v.pass[class] + q.charge(r.un, P.SHARES[class]))
  q.change(v, 'running', v.running + 1)
  return r
end

function q.take(at, limit)
  local granted = {}
  local offers, waits, slots_of = q.read_offers(at)
  while #granted < limit do
    local offer = q.least_loaded(offers, waits)
    if not offer then break end
    local version = offer.version
    local r = q.draw(q.version_of(version), slots_of[version])
    waits[version] = waits[version] - 1
    local main, prefill = q.choose_seats(offers, version, r)
    q.occupy(main)
    if prefill then
      q.occupy(prefill)
      r.i2, r.p2 = prefill.instance, prefill.place
    end
    r.st, r.is, r.pc, r.gr, r.lx = 'granted', main.instance, main.place, now, now + P.LEASE
    q.write(r)
    call('ZADD', q.key('leases'), r.lx, r.id)
    call('ZADD', q.key('due'), now + P.RETRY, r.id)
    granted[#granted + 1] = q.ticket(r)
  end
  return granted
end
