-- Set `until_then`: until when a state is needed, also if the limit is slower than the one that wrote it.
local until_then = held[1] - held[p + 1]
if kind == BUCKET then
    -- One step more: the bucket is full at the end of a step.
    until_then = until_then + held[p + 2] / gate[g + NUMERATOR] * gate[g + DENOMINATOR] + gate[g + STEP] - 1
else
    until_then = until_then - until_then % window + (kind == FIXED and window or 2 * window)
end
if extra then
    local whole = kind == BUCKET and gate[g + FULL] + gate[g + STEP] or 2 * window
    until_then = needed_with(extra, until_then, whole)
end
