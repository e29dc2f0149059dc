-- ARGV: 3 attempt. Answers removed | running | gone | unknown.
local id = ARGV[3]
local r = read(id)
if not r then
  write_end(id)
  return 'unknown'
end
if r.st == 'queued' then
  unqueue(r)
  bury(r)
  return 'removed'
end
if r.st == 'refused' then
  call('ZREM', key('due'), id)
  bury(r)
end
if r.st == 'granted' then return 'running' end
return 'gone'
