-- ARGV: 3 begin: instance, version, purpose, until, rotate (1 or 0) | 3 clear: instance.
-- begin answers {granted (1 or 0), in use, waiting}.
local instance = ARGV[4]
if ARGV[3] == 'clear' then
  if call('HDEL', key('drains'), instance) == 1 then call('INCR', key('revision')) end
  return 'OK'
end
if is_stale() then return STALE end
local mark, in_use, wanted = drain_mark(instance), num(call('HGET', key('in_use'), instance)), waiting(ARGV[5])
local ours = mark and mark.purpose == ARGV[6]
if mark and not ours then return {0, in_use, wanted} end
if not ours and ARGV[8] == '0' and (in_use > 0 or wanted > 0) then return {0, in_use, wanted} end
call('HSET', key('drains'), instance, ARGV[7] .. '|' .. ARGV[6])
call('INCR', key('revision'))
return {1, in_use, wanted}
