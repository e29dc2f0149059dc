-- Endings, then entries, then grants, as one decision.
-- ARGV: 3 endings, 4 entries, 5 limit of grants (0 = none are made), then the endings, the entries and the offers,
-- laid out as `finish.lua`, `enqueue.lua` and `take.lua` say.
-- Answers {finishes, enqueued, granted tickets, refused tickets}.
local endings, entries, limit, at = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), 6
if limit > 0 and q.is_stale() then return P.STALE end
local finished, enqueued, granted, refused = {}, {}, {}, {}
for i = 1, endings do
  finished[i] = q.finish_one(at)
  at = at + 6
end
for i = 1, entries do
  enqueued[i] = q.enqueue_one(at)
  at = at + 16
end
if limit > 0 then
  refused = q.refuse_overdue()
  granted = q.take(at, limit)
end
q.save()
return {finished, enqueued, granted, refused}
