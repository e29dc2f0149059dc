-- Queue one attempt. ARGV from `at` on: attempt, tenant, version, class (1..3), input tokens, max output tokens,
-- deadline, weight, payload, queue limit, slots, start after (ms), warm tokens by instance (see `warm_tokens`),
-- token limit (0 = none), longest wait (ms, 0 = up to the deadline). Answers {'known', standing} | {'full', retry ms} |
-- {'shed', retry ms} | {'late', wait ms} | {'queued', position, wait ms}.
local function enqueue_one(at)
  local id, tenant, version, class = ARGV[at], ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3])
  local input, most, deadline = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6])
  local weight = tonumber(ARGV[at + 7])
  local known = read(id)
  if known then return {'known', known.st} end
  local queued = call('HMGET', key('queued'), 'n:' .. tenant, 't:' .. tenant)
  local count, tokens, token_limit = num(queued[1]), num(queued[2]), tonumber(ARGV[at + 13])
  local places, excess = math.max(0, count + 1 - tonumber(ARGV[at + 9])), tokens + input + most - token_limit
  if token_limit > 0 and count > 0 and excess > 0 then -- so many requests of average size must go first
    places = math.max(places, math.min(count, -floor(-excess * count / math.max(1, tokens))))
  end
  if places > 0 then
    local pace = floor(num(call('HGET', key('pace'), 'a:' .. tenant)) / 1000)
    return {'full', int(places * (pace > 0 and pace or 1000))}
  end

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
  write({id = id, st = 'queued', tn = tenant, ve = version, cl = class, ['in'] = input, mo = most, dl = deadline,
         we = weight, pl = ARGV[at + 8], sq = seq, eq = now, wa = ARGV[at + 12], is = '', pc = '', i2 = '', p2 = '',
         rs = '', ms = '', gr = 0, lx = 0, ed = 0, ui = 0, uc = 0, uo = 0, un = 0, ep = 0})
  if here == 0 or seq % 64 == 0 then
    call('EXPIRE', accounts_key(class, version), IDLE_SECONDS)
    call('EXPIRE', version_key(version), IDLE_SECONDS)
  end
  return {'queued', int(rank), int(wait)}
end
