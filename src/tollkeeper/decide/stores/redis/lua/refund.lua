-- Give units back to every limit of a rule, never beyond an untouched quota.
--
-- ARGV[2]  the units
-- ARGV[3]  the time in microseconds; absent or empty: the server's
-- ARGV[4]  to undo a check, instead of ARGV[2]: msgpack of three numbers for each limit, its own
--          units, the units taken from a grant, and the time when that grant ends

local exact = ARGV[4] and cmsgpack.unpack(ARGV[4])
if not raw and not exact then
    return 0
end
local dropped, truncated = {}, {}

-- Return one limit's state after the refund: last, a, b; or nothing, if no state is left.
local function refunded(g, last, a, b, units)
    local kind, window = gate[g + KIND], gate[g + WINDOW]
    if kind == BUCKET then
        local used = used_now(g, last, a, now) - units * MICROS_PER_UNIT
        if used > 0 then
            return max(last, now), used
        end
    elseif kind == FIXED then
        if now - fmod(now, window) <= last - fmod(last, window) and a > units then
            return last, a - units
        end
    elseif kind == COUNTER then
        local at, previous, current = rolled(window, last, a, b, now)
        local from_current = min(current, units)
        current = current - from_current
        previous = previous - min(previous, units - from_current)
        if previous > 0 or current > 0 then
            return at, previous, current
        end
    else
        local log, per_chunk = log_of(g), fmod(b, 1024)
        local kept = (b - per_chunk) / 1024
        local finish = a + kept - min(units, kept)
        -- The first chunk to drop: the one of the next time, or the one after it.
        local first = finish > a and math.ceil(finish / per_chunk) or floor(a / per_chunk)
        truncated[#truncated + 1] = {log, first, floor((a + kept - 1) / per_chunk)}
        if finish > a then
            return log.time_at(per_chunk, finish - 1), a, (finish - a) * 1024 + per_chunk
        end
    end
end

local changed, need_us = false, 0
for g = GATE_FIRST, #gate, GATE_STEP do
    local i = (g - GATE_FIRST) / GATE_STEP * 3
    local units = exact and exact[i + 1] or tonumber(ARGV[2])
    local p = place(gate[g + ID])
    if p and units > 0 then
        local wide = width(gate[g + ID]) == 4
        local b = wide and held[p + 3]
        local last, a
        last, a, b = refunded(g, held[1] - held[p + 1], held[p + 2], b, units)
        if last then
            held[p + 1], held[p + 2] = held[1] - last, a
            if wide then
                held[p + 3] = b
            end
        else
            dropped[p] = true
        end
        changed = true
    end
    if exact and exact[i + 2] > 0 and now < exact[i + 3] then
        local id = -gate[g + ID]
        local q = place(id)
        local drawn, ends = exact[i + 2], exact[i + 3]
        if q then
            drawn, ends = drawn + held[q + 2], max(ends, held[q + 3])
        end
        q = q or #held + 1
        held[q], held[q + 1], held[q + 2], held[q + 3] = id, 0, drawn, ends
        need_us = max(need_us, ends - now)
        changed = true
    end
end
if changed then
    local states = without(dropped)
    if need_us > 0 then
        keep(states, need_us)
    else
        write(states)
    end
    for _, log in ipairs(truncated) do
        log[1].drop(log[2], log[3])
    end
end
return 1
