-- Settle one attempt. ARGV from `at` on: attempt, done (1 or 0), input, cached, output tokens, run ms.
-- Answers the version whose slot is free now, or '' if there was nothing to end.
function q.finish_one(at)
  local r = q.read(ARGV[at])
  if not r or (r.st ~= 'queued' and r.st ~= 'granted') then return '' end
  if r.st == 'queued' then
    q.unqueue(r)
  else
    r.ui, r.uc, r.uo = tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
    q.release(r, tonumber(ARGV[at + 5]), ARGV[at + 1] == '1')
  end
  q.write_end(r.id)
  return r.ve
end
