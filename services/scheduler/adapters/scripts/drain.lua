-- ARGV: 3 begin: instance, version, purpose, until, rotate (1 or 0) -> {granted (1 or 0), in use, waiting}
--       3 clear: instance, purpose ('' = any) -> OK
--       3 send: purpose, until, instances -> 1 | 0
-- A mark is "<until>|<stage>|<length of version>|<version><purpose>"; the stages are those of `DrainStage`.
local function mark_of(until_ms, stage, version, purpose)
  return until_ms .. '|' .. stage .. '|' .. #version .. '|' .. version .. purpose
end
local instance = ARGV[4]
if ARGV[3] == 'clear' then
  local value = call('HGET', q.key('drains'), instance)
  if value and (ARGV[5] == '' or q.read_mark(value).purpose == ARGV[5]) then
    call('HDEL', q.key('drains'), instance)
    call('INCR', q.key('revision'))
  end
  return 'OK'
end
if q.is_stale() then return P.STALE end
if ARGV[3] == 'send' then
  local marks = {}
  for i = 6, #ARGV do
    marks[i] = q.drain_mark(ARGV[i])
    if not marks[i] or marks[i].purpose ~= ARGV[4] then return 0 end
  end
  for i = 6, #ARGV do
    call('HSET', q.key('drains'), ARGV[i], mark_of(ARGV[5], 's', marks[i].of, ARGV[4]))
  end
  call('INCR', q.key('revision'))
  return 1
end
local mark, wanted = q.drain_mark(instance), q.waiting(q.version_of(ARGV[5]))
local in_use = q.num(call('HGET', q.key('in_use'), instance))
local ours = mark and mark.purpose == ARGV[6]
if mark and not ours then return {0, in_use, wanted} end
if not ours and ARGV[8] == '0' and (in_use > 0 or wanted > 0) then return {0, in_use, wanted} end
local stage = ours and mark.stage or (ARGV[8] == '1' and 'r' or 'i')
call('HSET', q.key('drains'), instance, mark_of(ARGV[7], stage, q.base_of(ARGV[5]), ARGV[6]))
call('INCR', q.key('revision'))
return {1, in_use, wanted}
