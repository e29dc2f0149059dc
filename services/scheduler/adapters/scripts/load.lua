-- ARGV: 3 claim: version, node, owner, until, amount, revision -> claimed | taken | stale
--       3 renew: version, owner, until -> 1 | 0
--       3 release: version, node, owner, retry at ('' = success), tries, cause -> OK
-- Claims are "<until>|<bytes>:<devices>|<length of node>|<node><owner>"; failures are "<retry at>|<tries>|<cause>" by
-- "<length of node>:<node><version>".
local version = ARGV[4]
local held = call('HGET', q.key('loads'), version)
local until_ms, bytes, length, rest
if held then
  until_ms, bytes, length, rest = string.match(held, '^(%d+)|([^|]*)|(%d+)|(.*)$')
end
local function write(node, owner, until_text, bytes_text)
  call('HSET', q.key('loads'), version, until_text .. '|' .. bytes_text .. '|' .. #node .. '|' .. node .. owner)
end
local function owner_of_held() return held and string.sub(rest, tonumber(length) + 1) end

if ARGV[3] == 'claim' then
  if q.is_stale() then return P.STALE end
  if held and tonumber(until_ms) > now then return 'taken' end
  if q.num(call('GET', q.key('revision'))) ~= tonumber(ARGV[9]) then return 'stale' end
  write(ARGV[5], ARGV[6], ARGV[7], ARGV[8])
  local base, owner = string.match(version, '^(.*@[^!@]*)!(.*)$')
  local instance = #ARGV[5] .. ':' .. ARGV[5] .. ':' .. (base or version)
  if owner then call('HSET', q.key('owners'), instance, owner) else call('HDEL', q.key('owners'), instance) end
  call('INCR', q.key('revision'))
  return 'claimed'
end
if ARGV[3] == 'renew' then
  if owner_of_held() ~= ARGV[5] then return 0 end
  write(string.sub(rest, 1, tonumber(length)), ARGV[5], ARGV[6], bytes)
  return 1
end
if owner_of_held() == ARGV[6] then call('HDEL', q.key('loads'), version) end
local failure = #ARGV[5] .. ':' .. ARGV[5] .. version
if ARGV[7] == '' then
  call('HDEL', q.key('failures'), failure)
else
  call('HSET', q.key('failures'), failure, ARGV[7] .. '|' .. ARGV[8] .. '|' .. ARGV[9])
end
call('INCR', q.key('revision'))
return 'OK'
