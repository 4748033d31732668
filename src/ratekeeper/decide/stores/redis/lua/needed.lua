-- Set `until_then`: until when a state is needed, also if the limit is slower than the one that wrote it.
local until_then, owed_now = held[1] - held[p + 1], extra and extra[OWED] or 0
if kind == BUCKET then
    local full = (held[p + 2] + owed_now) / gate[g + NUMERATOR] * gate[g + DENOMINATOR]
    until_then = until_then + full + gate[g + STEP] - 1 -- one step more: it is full at the end of a step
else
    local windows = (kind == FIXED and 1 or 2) + ceil(owed_now / gate[g + CAPACITY])
    until_then = until_then - until_then % window + windows * window
end
if extra then
    local whole = kind == BUCKET and gate[g + FULL] + gate[g + STEP] or 2 * window
    until_then = needed_with(extra, until_then, whole)
end
