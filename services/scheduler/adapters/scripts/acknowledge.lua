-- ARGV: attempts from 3 on, whose grant, refusal or usage event arrived.
for i = 3, #ARGV do
  local r = read(ARGV[i])
  if r then
    call('ZREM', key('due'), r.id)
    if r.st == 'refused' or r.st == 'lapsed' then bury(r) end
  end
end
return 'OK'
