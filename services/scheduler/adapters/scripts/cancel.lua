-- ARGV: 3 attempt. Answers removed | running | gone | unknown.
local id = ARGV[3]
local r = q.read(id)
if not r then
  q.write_end(id)
  return 'unknown'
end
if r.st == 'queued' then
  q.unqueue(r)
  q.write_end(id)
  q.save()
  return 'removed'
end
if r.st == 'refused' then
  call('ZREM', q.key('due'), id)
  q.write_end(id)
end
if r.st == 'granted' then return 'running' end
return 'gone'
