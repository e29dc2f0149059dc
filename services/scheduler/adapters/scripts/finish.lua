-- ARGV: for each ending from 3 on: attempt, done (1 or 0), input, cached, output tokens, run ms.
-- Answers, for each, the version whose slot is free now, or '' if there was nothing to end.
local answers = {}
for i = 3, #ARGV, 6 do
  local r = read(ARGV[i])
  local answer = ''
  if r and (r.st == 'queued' or r.st == 'granted') then
    answer = r.ve
    if r.st == 'queued' then
      unqueue(r)
    else
      r.ui, r.uc, r.uo = tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3]), tonumber(ARGV[i + 4])
      release(r)
      if ARGV[i + 1] == '1' then
        local acc, accounts = account(r.cl, r.ve, r.tn), accounts_key(r.cl, r.ve)
        call('HSET', accounts, 'o:' .. r.tn, int(moved(acc.output, r.uo)), 'c:' .. r.tn, int(moved(acc.cost, r.un)))
        local run = tonumber(ARGV[i + 5])
        if run > 0 then
          local average = num(call('HGET', version_key(r.ve), 'ra'))
          call('HSET', version_key(r.ve), 'ra', int(moved(average, run)))
        end
      end
    end
    bury(r)
  end
  answers[#answers + 1] = answer
end
return answers
