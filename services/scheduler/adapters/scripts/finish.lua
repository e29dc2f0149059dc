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
      local run = tonumber(ARGV[i + 5])
      release(r, run)
      if ARGV[i + 1] == '1' then
        local acc, accounts = account(r.cl, r.ve, r.tn), accounts_key(r.cl, r.ve)
        call('HSET', accounts, 'o:' .. r.tn, int(moved(acc.output, r.uo)), 'c:' .. r.tn, int(moved(acc.cost, r.un)))
        local model = call('HMGET', version_key(r.ve), 'ra', 'ro')
        call('HSET', version_key(r.ve), 'ro', int(moved(num(model[2]), r.uo)),
             'ra', int(run > 0 and moved(num(model[1]), run) or num(model[1])))
      end
    end
    bury(r)
  end
  answers[#answers + 1] = answer
end
return answers
