-- Queue one attempt. ARGV from `at` on: attempt, tenant, version, class (1..3), input tokens, max output tokens,
-- deadline, weight, payload, queue limit, slots, start after (ms), warm tokens by instance (see `warm_tokens`),
-- token limit (0 = none), longest wait (ms, 0 = up to the deadline), further queues (scope, request limit or -1, token
-- limit or 0 of each). Answers {'known', standing} | {'full', retry ms, scope} | {'shed', retry ms} | {'late', wait ms} |
-- {'queued', position, wait ms}.
local function full_for(count, tokens, request_limit, token_limit, size, pace)
  local places = request_limit >= 0 and math.max(0, count + 1 - request_limit) or 0
  local excess = tokens + size - token_limit
  if token_limit > 0 and count > 0 and excess > 0 then -- so many requests of average size must go first
    places = math.max(places, math.min(count, -floor(-excess * count / math.max(1, tokens))))
  end
  if places == 0 then return 0 end
  pace = floor(num(call('HGET', pace[1], pace[2])) / 1000)
  return places * (pace > 0 and pace or 1000)
end

-- Of the full queues the one that takes longest to have room; 0 if all have room. Answers the wait and the scope.
local function fullest(tenant, size, request_limit, token_limit, further)
  local queued = call('HMGET', key('queued'), 'n:' .. tenant, 't:' .. tenant)
  local worst, worst_scope = full_for(num(queued[1]), num(queued[2]), request_limit, token_limit, size,
                                      {key('pace'), 'a:' .. tenant}), ''
  for scope, requests, tokens in string.gmatch(further, '(%S+) (%S+) (%S+)') do
    local name = scoped(tenant, scope)
    queued = call('HMGET', key('scoped'), 'n:' .. name, 't:' .. name)
    local wait = full_for(num(queued[1]), num(queued[2]), tonumber(requests), tonumber(tokens), size,
                          {key('scoped'), 'a:' .. name})
    if wait > worst then worst, worst_scope = wait, scope end
  end
  return worst, worst_scope
end

local function enqueue_one(at)
  local id, tenant, version, class = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local input, most, deadline = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local weight = tonumber(ARGV[at + 7])
  local known = read(id)
  if known then return {'known', known.st} end
  local further = ARGV[at + 15]
  local full_ms, full_scope =
    fullest(tenant, input + most, tonumber(ARGV[at + 9]), tonumber(ARGV[at + 13]), further)
  if full_ms > 0 then return {'full', int(full_ms), full_scope} end

  local queue, lane = queue_key(class, version, tenant), tenants_key(class, version)
  local state = call('HMGET', version_key(version), 'rn', 'ra', 'pf', 'p1', 'p2', 'p3', 'ro')
  local here, slots = lane_waiting(class, version), tonumber(ARGV[at + 10])
  if class == 3 then
    local over = overload(lane_waiting(1, version) + lane_waiting(2, version), num(state[2]), slots)
    if over > 0 then return {'shed', int(over)} end
  end
  local rank = call('ZCOUNT', queue, '-inf', int(deadline)) -- equal deadlines came earlier
  local own = call('ZCARD', queue)
  local others = call('ZCARD', lane) - (own > 0 and 1 or 0)
  local ahead = math.min(here, rank * (others + 1))
  if slots > 0 and num(state[1]) >= slots then ahead = ahead + 1 end
  local wait = tonumber(ARGV[at + 11]) + floor(ahead * num(state[2]) / (1000 * math.max(1, slots)))
  local longest = tonumber(ARGV[at + 14])
  if now + wait > deadline or (longest > 0 and wait > longest) then return {'late', int(wait)} end

  reclaim(version)
  if here == 0 then -- the class comes back: up to the least pass of the classes that wait
    local least
    for other = 1, 3 do
      if other ~= class and lane_waiting(other, version) > 0 then
        local pass = num(state[3 + other])
        if not least or pass < least then least = pass end
      end
    end
    least = least or num(state[3])
    if num(state[3 + class]) < least then call('HSET', version_key(version), 'p' .. class, int(least)) end
    call('SADD', key('lanes'), lane_id(class, version))
  end
  local acc = account(class, version, tenant)
  if own == 0 then -- the tenant comes back: up to the least service less its credit (invariant 5)
    local first = call('ZRANGE', lane, 0, 0, 'WITHSCORES')[2]
    local base = first and tonumber(first) or acc.floor
    local average = acc.cost
    if average == 0 then average = predicted(acc, num(state[7]), num(state[2]), input, most) * 1000 end
    local least = base - floor(CREDIT * average * 1000 / weight)
    if acc.service < least then
      acc.service = least
      call('HSET', accounts_key(class, version), 's:' .. tenant, int(least), 'e:' .. tenant, int(acc.epoch + 1))
    end
    call('ZADD', lane, int(acc.service), member(acc.turn, tenant))
  end
  local seq = call('INCR', key('arrivals'))
  call('ZADD', queue, int(deadline), member(seq, id))
  call('ZADD', age_key(class, version), int(now), id)
  deepen(class, version, 1)
  call('ZADD', key('deadlines'), int(deadline), id)
  call('HINCRBY', key('queued'), 'n:' .. tenant, 1)
  call('HINCRBY', key('queued'), 't:' .. tenant, int(input + most))
  local scopes = further ~= '' and scopes_in(further) or nil
  if scopes then
    for scope in string.gmatch(scopes, '%S+') do
      call('HINCRBY', key('scoped'), 'n:' .. scoped(tenant, scope), 1)
      call('HINCRBY', key('scoped'), 't:' .. scoped(tenant, scope), int(input + most))
    end
    call('EXPIRE', key('scoped'), IDLE_SECONDS)
  end
  write({id = id, st = 'queued', tn = tenant, ve = version, cl = class, ['in'] = input, mo = most, dl = deadline,
         we = weight, pl = ARGV[at + 8], sq = seq, eq = now, sc = scopes, wa = ARGV[at + 12], is = '', pc = '', i2 = '', p2 = '',
         rs = '', ms = '', gr = 0, lx = 0, ed = 0, ui = 0, uc = 0, uo = 0, un = 0, ep = 0})
  if here == 0 or seq % 64 == 0 then
    call('EXPIRE', accounts_key(class, version), IDLE_SECONDS)
    call('EXPIRE', version_key(version), IDLE_SECONDS)
  end
  return {'queued', int(rank), int(wait)}
end
