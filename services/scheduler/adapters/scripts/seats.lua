-- Which free offer, or pair of offers, brings a request its first token first: services/scheduler/domain/seats.py
function q.warm_tokens(text) -- "<tokens>|<length of instance>|<instance>" again and again
  local found, at = {}, 1
  while at <= #text do
    local cached, length, from = string.match(text, '^(%d+)|(%d+)|()', at)
    at = from + tonumber(length)
    found[string.sub(text, from, at - 1)] = tonumber(cached)
  end
  return found
end

function q.choose_seats(offers, version, r)
  local warm = q.warm_tokens(r.wa)
  local function crowd(offer) return floor(offer.used * offer.load_us / offer.slots) end
  local function prompt(offer) return math.max(0, r['in'] - (warm[offer.instance] or 0)) * offer.token_us end
  local function first_token(offer) return prompt(offer) + crowd(offer) end
  local function handed_over(offer) return first_token(offer) + offer.handoff_us end
  local function best_of(is_part, us)
    local best, least
    for _, offer in ipairs(offers) do
      if offer.version == version and offer.used < offer.slots and is_part(offer.part) then
        local time = us(offer)
        if not best or time < least or (time == least and offer.used * best.slots < best.used * offer.slots) then
          best, least = offer, time
        end
      end
    end
    return best, least
  end
  local whole, whole_us = best_of(function(part) return part ~= 'p' end, first_token)
  local prefill, prefill_us = best_of(function(part) return part == 'p' end, handed_over)
  local decode, decode_us = best_of(function(part) return part == 'd' end, crowd)
  if prefill and decode and prefill_us + decode_us < whole_us + whole.used * prompt(whole) then
    return decode, prefill
  end
  return whole, nil
end
