-- Shared steps of the scheduler's scripts; put before each verb. The oracle is services/scheduler/domain/fair_queue.py.
-- Arithmetic: services/scheduler/domain/service.py
function q.cost(input, cached, output)
  return max(0, input - cached) + P.OUTPUT_UNITS * output
end
function q.charge(units, weight) return floor(units * 1000000 / weight) end
function q.moved(average, value)
  if average == 0 then return value * 1000 end
  return average + floor((value * 1000 - average) / P.SHIFT)
end
function q.predicted(acc, v, input, most)
  if P.DEVICE_TIME then
    local model_run = v.run
    local run = acc.cost > 0 and acc.cost or model_run > 0 and model_run or P.FIRST_RUN * 1000
    return floor(run / 1000)
  end
  local average = acc.output > 0 and acc.output or v.output
  return q.cost(input, 0, min(most, average > 0 and floor(average / 1000) or P.FIRST_OUTPUT))
end
function q.units_of(r, ran)
  if P.DEVICE_TIME then return max(0, ran) end
  return q.cost(r.ui, r.uc, r.uo)
end
function q.overload(v, slots)
  if P.OVERLOAD == 0 then return 0 end
  local urgent = v.waiting[1] + v.waiting[2]
  return max(0, floor(urgent * v.run / (1000 * max(1, slots))) - P.OVERLOAD)
end

function q.enter_depth(family, name, size)
  local depth = q.depth_of(family, name)
  depth.count, depth.tokens, depth.changed = depth.count + 1, depth.tokens + size, true
end
function q.leave_depth(family, name, size)
  local depth = q.depth_of(family, name)
  depth.count, depth.tokens, depth.changed = max(0, depth.count - 1), max(0, depth.tokens - size), true
end

-- What an attempt that waits no more leaves behind, beside its place in its queue.
function q.stop_waiting(r, lane, acc)
  acc.own, acc.changed = acc.own - 1, true
  q.change_class(lane.v, 'waiting', r.cl, lane.v.waiting[r.cl] - 1)
  if lane.v.waiting[r.cl] == 0 then call('SREM', q.key('lanes'), lane.id) end
  call('ZREM', lane.ages, r.id)
  call('ZREM', q.key('deadlines'), r.id)
  q.leave_depth('queued', r.tn, r['in'] + r.mo)
  if r.sc == '' then return end
  for scope in string.gmatch(r.sc, '%S+') do q.leave_depth('scoped', q.scoped(r.tn, scope), r['in'] + r.mo) end
end

function q.unqueue(r)
  local lane = q.lane_of(q.version_of(r.ve), r.cl)
  local acc = q.account(lane, r.tn)
  call('ZREM', lane.queues .. r.tn, q.member(r.sq, r.id))
  q.stop_waiting(r, lane, acc)
  if acc.own == 0 then call('ZREM', lane.seats, q.member(acc.turn, r.tn)) end
end

-- Replaces what an attempt was charged by `units`; a refund from before the tenant's last lift is dropped.
function q.correct(r, units)
  local v, amount = q.version_of(r.ve), q.charge(units, r.we) - q.charge(r.un, r.we)
  local lane = q.lane_of(v, r.cl)
  local acc = q.account(lane, r.tn)
  if amount ~= 0 and (amount > 0 or acc.epoch == r.ep) then
    acc.service, acc.changed = acc.service + amount, true
    if acc.own > 0 then call('ZADD', lane.seats, acc.service, q.member(acc.turn, r.tn)) end
  end
  local shift = q.charge(units, P.SHARES[r.cl]) - q.charge(r.un, P.SHARES[r.cl])
  if shift ~= 0 then q.change_class(v, 'pass', r.cl, v.pass[r.cl] + shift) end
  r.un = units
end

-- The first output token was decoded elsewhere: the prompt's instance is done with the request.
function q.leave_prefill(r)
  if r.i2 == '' then return end
  q.use(r.i2, -1)
  r.i2 = ''
end

-- The slot is free; what was charged is corrected to what was used. `learn`: it is one to predict others from.
function q.release(r, ran, learn)
  q.correct(r, q.units_of(r, ran))
  local v = q.version_of(r.ve)
  q.change(v, 'running', v.running - 1)
  if learn then
    local acc = q.account(q.lane_of(v, r.cl), r.tn)
    acc.output, acc.cost, acc.changed = q.moved(acc.output, r.uo), q.moved(acc.cost, r.un), true
    q.change(v, 'output', q.moved(v.output, r.uo))
    if ran > 0 then q.change(v, 'run', q.moved(v.run, ran)) end
  end
  q.use(r.is, -1)
  q.leave_prefill(r)
  call('ZREM', q.key('leases'), r.id)
  call('ZREM', q.key('due'), r.id)
end

function q.refuse(r, reason, message)
  q.unqueue(r)
  r.st, r.rs, r.ms, r.ed = 'refused', reason, message, now
  q.write(r)
  call('ZADD', q.key('due'), now + P.RETRY, r.id)
  return q.ticket(r)
end

-- Whether the caller's time is that of the others: one that was frozen must hand nothing out. What nobody confirms is
-- forgotten: a clock that was ahead, or that a whole machine set back, stops the pool no longer than that.
function q.is_stale()
  local latest = q.num(call('GET', q.key('latest')))
  if now < latest - floor(P.LEASE / 4) then return true end
  if now > latest + P.FENCE_STEP then call('SET', q.key('latest'), now, 'EX', P.FENCE_SECONDS) end
  return false
end

function q.ripe(name)
  return call('ZRANGE', q.key(name), '-inf', now, 'BYSCORE', 'LIMIT', 0, P.BATCH)
end

function q.refuse_overdue()
  local refused = {}
  for _, id in ipairs(q.ripe('deadlines')) do
    local r = q.read(id)
    if r then refused[#refused + 1] = q.refuse(r, 'deadline', '') else call('ZREM', q.key('deadlines'), id) end
  end
  return refused
end

function q.base_of(version) return string.match(version, '^(.*@[^!@]*)!') or version end

-- Drain marks by instance: see `drain.lua`.
function q.read_mark(value)
  local until_ms, stage, length, rest = string.match(value, '^(%d+)|(%a)|(%d+)|(.*)$')
  length = tonumber(length)
  return {until_ms = q.num(until_ms), stage = stage, of = string.sub(rest, 1, length),
          purpose = string.sub(rest, length + 1)}
end
function q.drain_mark(instance)
  local value = call('HGET', q.key('drains'), instance)
  local mark = value and q.read_mark(value)
  if not mark or mark.until_ms <= now then return nil end
  return mark
end

-- `marks_exist`: how many of the two hashes there were when this run looked first: mostly neither.
function q.any(name)
  if not q.marks_exist then q.marks_exist = call('EXISTS', q.key('drains'), q.key('owners')) end
  return q.marks_exist == 2 or (q.marks_exist == 1 and call('EXISTS', q.key(name)) == 1)
end

-- A request for a version came: its instances that were closed as unwanted, and not sent away yet, stay.
function q.reclaim(version)
  if not q.any('drains') then return end
  local marks, base = call('HGETALL', q.key('drains')), q.base_of(version)
  for i = 1, #marks, 2 do
    local mark = q.read_mark(marks[i + 1])
    if mark.stage == 'i' and mark.of == base then
      call('HDEL', q.key('drains'), marks[i])
      call('INCR', q.key('revision'))
    end
  end
end
