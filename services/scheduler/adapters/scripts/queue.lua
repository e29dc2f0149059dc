-- Shared steps of the scheduler's scripts; put before each verb. The oracle is services/scheduler/domain/fair_queue.py.
-- KEYS[1] is the pool's prefix `rh:{p:<pool>}:`; every key is made from it, so all of a pool lives in one cluster slot.
-- ARGV[1] = now (ms), ARGV[2] = policy, in the order of `P` below. Numbers are integers below 2^52.
local call, floor = redis.call, math.floor
local now = tonumber(ARGV[1])
local P = {}
for each in string.gmatch(ARGV[2], '%d+') do P[#P + 1] = tonumber(each) end
local SHARES = {P[1], P[2], P[3]}
local AGEING, CREDIT, LEASE, RETRY, DELIVERY, TOMBSTONE = P[4], P[5], P[6], P[7], P[8], P[9]
local DEVICE_TIME, OVERLOAD, PAUSE = P[10] == 1, P[11], P[12]
local OUTPUT_UNITS, FIRST_OUTPUT, FIRST_RUN, SHIFT, BATCH = 2, 256, 1000, 8, 200
local FENCE_STEP = 100 -- the latest time is noted this coarsely
local IDLE_SECONDS = 86400 -- accounts and averages of a lane nobody used for a day are forgotten

local function key(name) return KEYS[1] .. name end
local function int(value) return string.format('%.0f', value + 0) end -- "-0" is no integer to the store
local function num(value) return tonumber(value or 0) or 0 end

-- Names: lengths first, so that no name can pose as two.
local function lane_id(class, version) return class .. ':' .. version end
local function age_key(class, version) return key('age:' .. lane_id(class, version)) end
local function tenants_key(class, version) return key('lane:' .. lane_id(class, version)) end
local function accounts_key(class, version) return key('acc:' .. lane_id(class, version)) end
local function queue_key(class, version, tenant)
  return key('q:' .. class .. ':' .. #version .. ':' .. version .. ':' .. tenant)
end
local function scoped(tenant, scope) return #tenant .. ':' .. tenant .. ':' .. scope end
local function scopes_in(further) -- without the limits
  local found = {}
  for scope in string.gmatch(further, '(%S+) %S+ %S+') do found[#found + 1] = scope end
  return table.concat(found, ' ')
end
local function version_key(version) return key('v:' .. version) end
local function request_key(id) return key('r:' .. id) end
-- In a queue: of equal deadlines the first to come. In a lane: of equal service the one with the oldest turn.
local function member(seq, id) return string.format('%016.0f', seq) .. id end

-- Arithmetic: services/scheduler/domain/service.py
local function cost(input, cached, output)
  return math.max(0, input - cached) + OUTPUT_UNITS * output
end
local function charge(units, weight) return floor(units * 1000000 / weight) end
local function moved(average, value)
  if average == 0 then return value * 1000 end
  return average + floor((value * 1000 - average) / SHIFT)
end
local function predicted(acc, model_output, model_run, input, most)
  if DEVICE_TIME then
    local run = acc.cost > 0 and acc.cost or model_run > 0 and model_run or FIRST_RUN * 1000
    return floor(run / 1000)
  end
  local average = acc.output > 0 and acc.output or model_output
  return cost(input, 0, math.min(most, average > 0 and floor(average / 1000) or FIRST_OUTPUT))
end
local function units_of(r, ran)
  if DEVICE_TIME then return math.max(0, ran) end
  return cost(r.ui, r.uc, r.uo)
end
local function overload(urgent, run_average, slots)
  if OVERLOAD == 0 then return 0 end
  return math.max(0, floor(urgent * run_average / (1000 * math.max(1, slots))) - OVERLOAD)
end

-- An attempt is one packed value; what is set when follows the life of an attempt in `domain/attempts.py`.
local function read(id)
  local packed = call('GET', request_key(id))
  if not packed then return nil end
  local r = cmsgpack.unpack(packed)
  r.id = id
  return r
end
local function write(r)
  local id = r.id
  r.id = nil
  call('SET', request_key(id), cmsgpack.pack(r))
  r.id = id
end
local function write_end(id)
  call('SET', request_key(id), cmsgpack.pack({st = 'ended', ed = now}), 'PX', TOMBSTONE)
end

local function ticket(r)
  return {r.id, r.st, r.pl, int(r.eq), r.ve, int(r.cl), r.pc, int(r.gr), int(r.lx), int(r.ed), r.rs, r.ms,
          int(r.ui), int(r.uc), int(r.uo), r.p2}
end

local depths = {} -- of lanes, as far as this run has looked
local function lane_waiting(class, version)
  local lane = lane_id(class, version)
  local depth = depths[lane]
  if not depth then
    depth = call('ZCARD', age_key(class, version))
    depths[lane] = depth
  end
  return depth
end
local function deepen(class, version, by)
  local lane = lane_id(class, version)
  if depths[lane] then depths[lane] = depths[lane] + by end
end
local function waiting(version)
  return lane_waiting(1, version) + lane_waiting(2, version) + lane_waiting(3, version)
end
local function oldest(class, version)
  return num(call('ZRANGE', age_key(class, version), 0, 0, 'WITHSCORES')[2])
end

local function account(r_class, version, tenant)
  local v = call('HMGET', accounts_key(r_class, version),
                 's:' .. tenant, 'e:' .. tenant, 'o:' .. tenant, 'c:' .. tenant, 'g:' .. tenant, 'floor', 'turns')
  return {service = num(v[1]), epoch = num(v[2]), output = num(v[3]), cost = num(v[4]), turn = num(v[5]),
          floor = num(v[6]), turns = num(v[7])}
end

-- Answers how many requests of the tenant wait after it. `more`: whether some of them wait in the same queue, if known.
local function unqueue(r, more)
  local queue = queue_key(r.cl, r.ve, r.tn)
  call('ZREM', queue, member(r.sq, r.id))
  if more == nil then more = call('ZCARD', queue) > 0 end
  if not more then
    local turn = num(call('HGET', accounts_key(r.cl, r.ve), 'g:' .. r.tn))
    call('ZREM', tenants_key(r.cl, r.ve), member(turn, r.tn))
  end
  call('ZREM', age_key(r.cl, r.ve), r.id)
  deepen(r.cl, r.ve, -1)
  if lane_waiting(r.cl, r.ve) == 0 then call('SREM', key('lanes'), lane_id(r.cl, r.ve)) end
  call('HINCRBY', key('queued'), 't:' .. r.tn, int(-(r['in'] + r.mo)))
  local left = call('HINCRBY', key('queued'), 'n:' .. r.tn, -1)
  if left <= 0 then call('HDEL', key('queued'), 'n:' .. r.tn, 't:' .. r.tn) end
  for scope in string.gmatch(r.sc or '', '%S+') do
    local name = scoped(r.tn, scope)
    call('HINCRBY', key('scoped'), 't:' .. name, int(-(r['in'] + r.mo)))
    if call('HINCRBY', key('scoped'), 'n:' .. name, -1) <= 0 then
      call('HDEL', key('scoped'), 'n:' .. name, 't:' .. name)
    end
  end
  call('ZREM', key('deadlines'), r.id)
  return left
end

-- Replaces what an attempt was charged by `units`; a refund from before the tenant's last lift is dropped.
local function correct(r, units)
  local amount = charge(units, r.we) - charge(r.un, r.we)
  local acc = account(r.cl, r.ve, r.tn)
  if amount > 0 or acc.epoch == r.ep then
    call('HSET', accounts_key(r.cl, r.ve), 's:' .. r.tn, int(acc.service + amount))
    call('ZADD', tenants_key(r.cl, r.ve), 'XX', int(acc.service + amount), member(acc.turn, r.tn))
  end
  local pass = 'p' .. r.cl
  local shift = charge(units, SHARES[r.cl]) - charge(r.un, SHARES[r.cl])
  if shift ~= 0 then call('HINCRBY', version_key(r.ve), pass, int(shift)) end
  r.un = units
end

local touched = {} -- instances whose last use is noted in this run
local function touch(instance)
  if touched[instance] then return end
  touched[instance] = true
  call('ZADD', key('used'), int(now), instance)
end
local function vacate(instance)
  if call('HINCRBY', key('in_use'), instance, -1) <= 0 then call('HDEL', key('in_use'), instance) end
  touch(instance)
end

-- The first output token was decoded elsewhere: the prompt's instance is done with the request.
local function leave_prefill(r)
  if r.i2 == '' then return end
  vacate(r.i2)
  r.i2 = ''
end

-- The slot is free; what was charged is corrected to what was used. `learn`: it is one to predict others from.
local function release(r, ran, learn)
  local units = units_of(r, ran)
  local acc, model = account(r.cl, r.ve, r.tn), call('HMGET', version_key(r.ve), 'rn', 'p' .. r.cl, 'ra', 'ro')
  local amount = charge(units, r.we) - charge(r.un, r.we)
  if amount ~= 0 and (amount > 0 or acc.epoch == r.ep) then
    acc.service = acc.service + amount
    call('ZADD', tenants_key(r.cl, r.ve), 'XX', int(acc.service), member(acc.turn, r.tn))
  end
  local pass = num(model[2]) + charge(units, SHARES[r.cl]) - charge(r.un, SHARES[r.cl])
  r.un = units
  if learn then
    call('HSET', accounts_key(r.cl, r.ve), 's:' .. r.tn, int(acc.service), 'o:' .. r.tn, int(moved(acc.output, r.uo)),
         'c:' .. r.tn, int(moved(acc.cost, units)))
    call('HSET', version_key(r.ve), 'rn', int(num(model[1]) - 1), 'p' .. r.cl, int(pass),
         'ro', int(moved(num(model[4]), r.uo)), 'ra', int(ran > 0 and moved(num(model[3]), ran) or num(model[3])))
  else
    call('HSET', accounts_key(r.cl, r.ve), 's:' .. r.tn, int(acc.service))
    call('HSET', version_key(r.ve), 'rn', int(num(model[1]) - 1), 'p' .. r.cl, int(pass))
  end
  vacate(r.is)
  leave_prefill(r)
  call('ZREM', key('leases'), r.id)
  call('ZREM', key('due'), r.id)
end

-- What is left of an attempt: that it ended.
local function bury(r)
  write_end(r.id)
end

local function refuse(r, reason, message)
  unqueue(r)
  r.st, r.rs, r.ms, r.ed = 'refused', reason, message, now
  write(r)
  call('ZADD', key('due'), int(now + RETRY), r.id)
  return ticket(r)
end

-- Whether the caller's time is that of the others: one that was frozen must hand nothing out.
local function is_stale()
  local latest = num(call('GET', key('latest')))
  if now < latest - floor(LEASE / 4) then return true end
  if now > latest + FENCE_STEP then call('SET', key('latest'), int(now)) end
  return false
end
local STALE = {err = 'STALE the caller is behind the others'}

local function ripe(name)
  return call('ZRANGE', key(name), '-inf', int(now), 'BYSCORE', 'LIMIT', 0, BATCH)
end

local function refuse_overdue()
  local refused = {}
  for _, id in ipairs(ripe('deadlines')) do
    local r = read(id)
    if r then refused[#refused + 1] = refuse(r, 'deadline', '') else call('ZREM', key('deadlines'), id) end
  end
  return refused
end

local function base_of(version) return string.match(version, '^(.*@[^!@]*)!') or version end

-- Drain marks by instance: see `drain.lua`.
local function read_mark(value)
  local until_ms, stage, length, rest = string.match(value, '^(%d+)|(%a)|(%d+)|(.*)$')
  length = tonumber(length)
  return {until_ms = num(until_ms), stage = stage, of = string.sub(rest, 1, length),
          purpose = string.sub(rest, length + 1)}
end
local function drain_mark(instance)
  local value = call('HGET', key('drains'), instance)
  local mark = value and read_mark(value)
  if not mark or mark.until_ms <= now then return nil end
  return mark
end

local drains_exist -- as far as this run has looked; a run that makes marks does not ask
local function any_drains()
  if drains_exist == nil then drains_exist = call('EXISTS', key('drains')) == 1 end
  return drains_exist
end

-- A request for a version came: its instances that were closed as unwanted, and not sent away yet, stay.
local function reclaim(version)
  if not any_drains() then return end
  local marks, base = call('HGETALL', key('drains')), base_of(version)
  for i = 1, #marks, 2 do
    local mark = read_mark(marks[i + 1])
    if mark.stage == 'i' and mark.of == base then
      call('HDEL', key('drains'), marks[i])
      call('INCR', key('revision'))
    end
  end
end
