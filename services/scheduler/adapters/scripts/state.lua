-- What the scheduler's scripts keep in the store, and how; put before `queue.lua`, which says what is done with it.
-- KEYS[1] is the pool's prefix `rh:{p:<pool>}:<layout>:`; every key is made from it: a pool lives in one cluster slot.
-- ARGV[1] = now (ms), ARGV[2] = policy (packed, in the order of the names below). Numbers are integers below 2^52.
--
-- A call into the store costs a script more than its own arithmetic does. So what is read and changed together is one
-- packed value, a run keeps what it has read, and `save` writes what has changed, once, at the end of the run. Steps
-- are fields of one table: a function that reaches for a local of the script costs each run a search for it.
local call, floor, max, min, unpacked = redis.call, math.floor, math.max, math.min, cmsgpack.unpack
local now = tonumber(ARGV[1])
local P -- policy and constants
do
  local s1, s2, s3, ageing, credit, lease, retry, delivery, tombstone, by_time, overload, pause = unpacked(ARGV[2])
  P = {SHARES = {s1, s2, s3}, AGEING = ageing, CREDIT = credit, LEASE = lease, RETRY = retry, DELIVERY = delivery,
       TOMBSTONE = tombstone, DEVICE_TIME = by_time == 1, OVERLOAD = overload, PAUSE = pause,
       IDLE_SECONDS = 86400, -- accounts and averages of a lane nobody used for a day are forgotten
       OUTPUT_UNITS = 2, FIRST_OUTPUT = 256, FIRST_RUN = 1000, SHIFT = 8, -- see `domain/service.py`
       BATCH = 200, -- tickets of one expiry or claim
       NOTES = 1000, -- marks, claims or failures above which the void ones are forgotten; see `domain/residency.py`
       FENCE_STEP = 100, -- the latest time is noted this coarsely
       FENCE_SECONDS = 60, -- and forgotten after so long: a guess, longer than a process sleeps unnoticed
       STALE = {err = 'STALE the caller is behind the others'}}
end
local q = {versions = {}, depths = {queued = {}, scoped = {}}, uses = {}, uses_before = {}, touched = {}}

function q.key(name) return KEYS[1] .. name end
function q.num(value) return tonumber(value or 0) or 0 end

-- Names: lengths first, so that no name can pose as two.
function q.lane_id(class, version) return class .. ':' .. version end
function q.scoped(tenant, scope) return #tenant .. ':' .. tenant .. ':' .. scope end
function q.scopes_in(further) -- without the limits
  local found = {}
  for scope in string.gmatch(further, '(%S+) %S+ %S+') do found[#found + 1] = scope end
  return table.concat(found, ' ')
end
function q.request_key(id) return KEYS[1] .. 'r:' .. id end
-- In a queue: of equal deadlines the first to come. In a lane: of equal service the one with the oldest turn.
function q.member(number, name) return string.format('%016.0f', number) .. name end

-- `v:<version>`: requests that run, averages of run time and output, pass of the class served last, arrivals so far;
-- then for each class its pass, requests that wait, and of `domain/lanes.py` floor and turns; how long accounts last.
function q.version_of(name)
  local v = q.versions[name]
  if v then return v end
  local running, run, output, pass_floor, seq, p1, p2, p3, w1, w2, w3, f1, f2, f3, t1, t2, t3, k1, k2, k3 =
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  local packed = call('GET', KEYS[1] .. 'v:' .. name)
  if packed then
    running, run, output, pass_floor, seq, p1, p2, p3, w1, w2, w3, f1, f2, f3, t1, t2, t3, k1, k2, k3 = unpacked(packed)
  end
  v = {name = name, running = running, run = run, output = output, pass_floor = pass_floor, seq = seq,
       pass = {p1, p2, p3}, waiting = {w1, w2, w3}, floor = {f1, f2, f3}, turns = {t1, t2, t3}, kept = {k1, k2, k3},
       lanes = {}, changed = false}
  q.versions[name] = v
  return v
end
function q.change(v, what, value) v[what], v.changed = value, true end
function q.change_class(v, what, class, value) v[what][class], v.changed = value, true end
function q.waiting(v)
  return v.waiting[1] + v.waiting[2] + v.waiting[3]
end

-- A lane: `lane:` its waiting tenants by service, `age:` its waiting attempts by arrival, `q:` a tenant's by deadline.
function q.lane_of(v, class)
  local lane = v.lanes[class]
  if lane then return lane end
  local id = q.lane_id(class, v.name)
  lane = {v = v, class = class, id = id, seats = q.key('lane:' .. id), ages = q.key('age:' .. id),
          queues = q.key('q:' .. class .. ':' .. #v.name .. ':' .. v.name .. ':'), accounts = {}, renewed = false}
  v.lanes[class] = lane
  return lane
end
function q.oldest(lane)
  return q.num(call('ZRANGE', lane.ages, 0, 0, 'WITHSCORES')[2])
end

-- `acc:<lane>`, by tenant: service, epoch (lifts so far), last turn, averages of output and cost, requests that wait.
function q.account(lane, tenant)
  local acc = lane.accounts[tenant]
  if acc then return acc end
  local packed = call('HGET', q.key('acc:' .. lane.id), tenant)
  local service, epoch, turn, output, cost, own
  if packed then service, epoch, turn, output, cost, own = unpacked(packed) end
  acc = {service = service or 0, epoch = epoch or 0, turn = turn or 0, output = output or 0, cost = cost or 0,
         own = own or 0, changed = false}
  lane.accounts[tenant] = acc
  return acc
end
function q.save_accounts(lane)
  local changed = {}
  for tenant, acc in pairs(lane.accounts) do
    if acc.changed then
      changed[#changed + 1] = tenant
      changed[#changed + 1] = cmsgpack.pack(acc.service, acc.epoch, acc.turn, acc.output, acc.cost, acc.own)
    end
  end
  if #changed > 0 then call('HSET', q.key('acc:' .. lane.id), unpack(changed)) end
  if lane.renewed then
    call('EXPIRE', q.key('acc:' .. lane.id), floor((lane.v.kept[lane.class] - now) / 1000) + 1)
  end
end
-- The accounts outlive whatever waits in the lane: they say how much that is.
function q.keep_accounts(lane, deadline)
  local idle = P.IDLE_SECONDS * 1000
  if lane.v.kept[lane.class] < deadline + idle / 2 then
    q.change_class(lane.v, 'kept', lane.class, deadline + idle)
    lane.renewed = true
  end
end
function q.save_version(v)
  for _, lane in pairs(v.lanes) do q.save_accounts(lane) end
  if not v.changed then return end
  local p, w, f, t, k = v.pass, v.waiting, v.floor, v.turns, v.kept
  local packed = cmsgpack.pack(v.running, v.run, v.output, v.pass_floor, v.seq, p[1], p[2], p[3], w[1], w[2], w[3],
                               f[1], f[2], f[3], t[1], t[2], t[3], k[1], k[2], k[3])
  local kept = max(now, k[1], k[2], k[3])
  call('SET', KEYS[1] .. 'v:' .. v.name, packed, 'EX', P.IDLE_SECONDS + floor((kept - now) / 1000))
end

-- `queued` by tenant, `scoped` by tenant and scope: requests and tokens queued, time of the last dispatch, average of
-- the times between dispatches.
function q.depth_of(family, name)
  local depth = q.depths[family][name]
  if depth then return depth end
  local packed = call('HGET', q.key(family), name)
  local count, tokens, last, pace
  if packed then count, tokens, last, pace = unpacked(packed) end
  depth = {count = count or 0, tokens = tokens or 0, last = last or 0, pace = pace or 0, changed = false}
  q.depths[family][name] = depth
  return depth
end
function q.save_depths(family)
  if not next(q.depths[family]) then return end
  local kept, gone = {}, {}
  for name, depth in pairs(q.depths[family]) do
    if depth.changed and (depth.count > 0 or depth.last > 0 or depth.pace > 0) then
      kept[#kept + 1] = name
      kept[#kept + 1] = cmsgpack.pack(depth.count, depth.tokens, depth.last, depth.pace)
    elseif depth.changed then
      gone[#gone + 1] = name
    end
  end
  if #kept > 0 then call('HSET', q.key(family), unpack(kept)) end
  if #gone > 0 then call('HDEL', q.key(family), unpack(gone)) end
  if #kept > 0 and family == 'scoped' then call('EXPIRE', q.key(family), P.IDLE_SECONDS) end
end

-- `in_use`: slots in use by instance; `used`: when one was last taken or given back.
function q.read_uses(instances)
  local unread = {}
  for _, instance in ipairs(instances) do
    if not q.uses[instance] then unread[#unread + 1] = instance end
  end
  if #unread == 0 then return end
  for i, value in ipairs(call('HMGET', q.key('in_use'), unpack(unread))) do
    q.uses[unread[i]] = q.num(value)
    q.uses_before[unread[i]] = q.uses[unread[i]]
  end
end
function q.use(instance, by)
  if not q.uses[instance] then q.read_uses({instance}) end
  q.uses[instance] = q.uses[instance] + by
  if not q.touched[instance] then
    q.touched[instance] = true
    call('ZADD', q.key('used'), now, instance)
  end
end
function q.save_uses()
  for instance, count in pairs(q.uses) do
    if count ~= q.uses_before[instance] then
      if count > 0 then call('HSET', q.key('in_use'), instance, count) else call('HDEL', q.key('in_use'), instance) end
    end
  end
end

-- Every script that changed something ends with this.
function q.save()
  for _, v in pairs(q.versions) do q.save_version(v) end
  q.save_depths('queued')
  q.save_depths('scoped')
  q.save_uses()
end

-- `r:<attempt>`; what is set when follows the life of an attempt in `domain/attempts.py`.
function q.read(id)
  local packed = call('GET', q.request_key(id))
  if not packed then return nil end
  local st, tn, ve, cl, input, mo, dl, we, pl, sq, eq, sc, wa, is, pc, i2, p2, rs, ms, gr, lx, ed, ui, uc, uo, un, ep =
    unpacked(packed)
  if st == 'ended' then return {id = id, st = st} end
  return {id = id, st = st, tn = tn, ve = ve, cl = cl, ['in'] = input, mo = mo, dl = dl, we = we, pl = pl, sq = sq,
          eq = eq, sc = sc, wa = wa, is = is, pc = pc, i2 = i2, p2 = p2, rs = rs, ms = ms, gr = gr, lx = lx, ed = ed,
          ui = ui, uc = uc, uo = uo, un = un, ep = ep}
end
function q.packed_attempt(r)
  return cmsgpack.pack(r.st, r.tn, r.ve, r.cl, r['in'], r.mo, r.dl, r.we, r.pl, r.sq, r.eq, r.sc, r.wa, r.is, r.pc,
                       r.i2, r.p2, r.rs, r.ms, r.gr, r.lx, r.ed, r.ui, r.uc, r.uo, r.un, r.ep)
end
function q.write(r) call('SET', q.request_key(r.id), q.packed_attempt(r)) end
function q.write_end(id) call('SET', q.request_key(id), cmsgpack.pack('ended'), 'PX', P.TOMBSTONE) end

function q.ticket(r)
  return {r.id, r.st, r.pl, r.eq, r.ve, r.cl, r.pc, r.gr, r.lx, r.ed, r.rs, r.ms, r.ui, r.uc, r.uo, r.p2}
end
