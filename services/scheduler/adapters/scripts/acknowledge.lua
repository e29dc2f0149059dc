-- ARGV: attempts from 3 on, whose grant, refusal or usage event arrived.
for i = 3, #ARGV do
  local r = q.read(ARGV[i])
  if r then
    call('ZREM', q.key('due'), r.id)
    if r.st == 'refused' or r.st == 'lapsed' then q.write_end(r.id) end
  end
end
return 'OK'
