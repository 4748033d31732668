-- What scripts of states have in common, after the functions: the gates.

local fields, next_key = nil, 1

-- Return until when a state is needed, also if the limit is slower than the one that wrote it.
local function needed(gate, g, held, p, extra)
    local kind, window, at, need = gate[g + KIND], gate[g + WINDOW], held[1] - held[p + 1], nil
    if kind == BUCKET then
        -- One step more: the bucket is full at the end of a step.
        need = at + held[p + 2] / gate[g + NUMERATOR] * gate[g + DENOMINATOR] + gate[g + STEP] - 1
    else
        need = at - at % window + (kind == FIXED and window or 2 * window)
    end
    if extra then
        return needed_with(extra, need, kind == BUCKET and gate[g + FULL] + gate[g + STEP] or 2 * window)
    end
    return need
end
