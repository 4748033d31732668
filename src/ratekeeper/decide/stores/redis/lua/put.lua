-- Put the state that a change has returned (`at`, `new_a`, `new_b`) in the place of the last one.
if not at and extra[3] > 0 then -- what is held stays held
    at, new_a, new_b = last, 0, b and 0
end
extra[OWED] = at and extra[OWED] or 0
a, b = at and new_a or 0, at and new_b or 0
held[p + 1], held[p + 2] = at and held[1] - at or held[1] + 1, a
if kind == COUNTER then
    held[p + 3] = b
end
