-- Queue one attempt. ARGV from `at` on: attempt, tenant, version, class (1..3), input tokens, max output tokens,
-- deadline, weight, payload, queue limit, slots, start after (ms), warm tokens by instance (see `warm_tokens`),
-- token limit (0 = none), longest wait (ms, 0 = up to the deadline), further queues (scope, request limit or -1, token
-- limit or 0 of each). Answers {'known', standing} | {'full', retry ms, scope} | {'shed', retry ms} |
-- {'late', wait ms} | {'queued', position, wait ms}.
function q.full_for(depth, request_limit, token_limit, size)
  local count, tokens = depth.count, depth.tokens
  local places = request_limit >= 0 and max(0, count + 1 - request_limit) or 0
  local excess = tokens + size - token_limit
  if token_limit > 0 and count > 0 and excess > 0 then -- so many requests of average size must go first
    places = max(places, min(count, -floor(-excess * count / max(1, tokens))))
  end
  if places == 0 then return 0 end
  local pace = floor(depth.pace / 1000)
  return places * (pace > 0 and pace or 1000)
end

-- Of the full queues the one that takes longest to have room; 0 if all have room. Answers the wait and the scope.
function q.fullest(tenant, size, request_limit, token_limit, further)
  local worst, worst_scope = q.full_for(q.depth_of('queued', tenant), request_limit, token_limit, size), ''
  for scope, requests, tokens in string.gmatch(further, '(%S+) (%S+) (%S+)') do
    local depth = q.depth_of('scoped', q.scoped(tenant, scope))
    local wait = q.full_for(depth, tonumber(requests), tonumber(tokens), size)
    if wait > worst then worst, worst_scope = wait, scope end
  end
  return worst, worst_scope
end

-- The class comes back: up to the least pass of the classes that wait.
function q.lift_class(v, class)
  local least
  for other = 1, 3 do
    if other ~= class and v.waiting[other] > 0 and (not least or v.pass[other] < least) then
      least = v.pass[other]
    end
  end
  q.change_class(v, 'pass', class, max(v.pass[class], least or v.pass_floor))
  call('SADD', q.key('lanes'), q.lane_id(class, v.name))
end

-- The tenant comes back: up to the least service less its credit (invariant 5).
function q.lift_tenant(lane, acc, tenant, input, most, weight)
  local first = call('ZRANGE', lane.seats, 0, 0, 'WITHSCORES')[2]
  local base = first and tonumber(first) or lane.v.floor[lane.class]
  local average = acc.cost > 0 and acc.cost or q.predicted(acc, lane.v, input, most) * 1000
  local least = base - floor(P.CREDIT * average * 1000 / weight)
  if acc.service < least then acc.service, acc.epoch = least, acc.epoch + 1 end
  call('ZADD', lane.seats, acc.service, q.member(acc.turn, tenant))
end

-- One that is known is not refused: nothing was changed for it.
function q.unless_known(id, answer)
  local known = q.read(id)
  return known and {'known', known.st} or answer
end

function q.enqueue_one(at)
  local id, tenant, version, class = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local input, most, deadline = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local weight, slots, further = tonumber(ARGV[at + 7]), tonumber(ARGV[at + 10]), ARGV[at + 15]
  local full_ms, full_scope =
    q.fullest(tenant, input + most, tonumber(ARGV[at + 9]), tonumber(ARGV[at + 13]), further)
  if full_ms > 0 then return q.unless_known(id, {'full', full_ms, full_scope}) end

  local v = q.version_of(version)
  if class == 3 and q.overload(v, slots) > 0 then return q.unless_known(id, {'shed', q.overload(v, slots)}) end
  local lane = q.lane_of(v, class)
  local acc, here = q.account(lane, tenant), v.waiting[class]
  local rank, ahead = 0, 0
  if acc.own > 0 then rank = call('ZCOUNT', lane.queues .. tenant, '-inf', deadline) end -- equal deadlines came earlier
  if rank > 0 then ahead = min(here, rank * call('ZCARD', lane.seats)) end -- the tenant's own seat is one of them
  if slots > 0 and v.running >= slots then ahead = ahead + 1 end
  local wait = tonumber(ARGV[at + 11]) + floor(ahead * v.run / (1000 * max(1, slots)))
  local longest = tonumber(ARGV[at + 14])
  if now + wait > deadline or (longest > 0 and wait > longest) then return q.unless_known(id, {'late', wait}) end

  local seq, scopes = v.seq + 1, further ~= '' and q.scopes_in(further) or ''
  local r = {id = id, st = 'queued', tn = tenant, ve = version, cl = class, ['in'] = input, mo = most, dl = deadline,
             we = weight, pl = ARGV[at + 8], sq = seq, eq = now, sc = scopes, wa = ARGV[at + 12], is = '', pc = '',
             i2 = '', p2 = '', rs = '', ms = '', gr = 0, lx = 0, ed = 0, ui = 0, uc = 0, uo = 0, un = 0, ep = 0}
  if not call('SET', q.request_key(id), q.packed_attempt(r), 'NX') then return {'known', q.read(id).st} end
  q.change(v, 'seq', seq)
  q.reclaim(version)
  if here == 0 then q.lift_class(v, class) end
  if acc.own == 0 then q.lift_tenant(lane, acc, tenant, input, most, weight) end
  acc.own, acc.changed = acc.own + 1, true
  q.change_class(v, 'waiting', class, here + 1)
  call('ZADD', lane.queues .. tenant, deadline, q.member(seq, id))
  call('ZADD', lane.ages, now, id)
  call('ZADD', q.key('deadlines'), deadline, id)
  q.enter_depth('queued', tenant, input + most)
  for scope in string.gmatch(scopes, '%S+') do q.enter_depth('scoped', q.scoped(tenant, scope), input + most) end
  q.keep_accounts(lane, deadline)
  return {'queued', rank, wait}
end
