-- Gives directives with their reports. KEYS: as put.lua. ARGV: "live" | "set" KEY | "ids" ID...; drops those that ended
-- before ARGV[1] (seconds since 1970).
-- Returns {version, entry, report or "", entry, report or "", ...}.
for _, id in ipairs(redis.call("ZRANGEBYSCORE", KEYS[7], "-inf", "(" .. ARGV[1], "LIMIT", 0, 1000)) do
  for _, key in ipairs({KEYS[2], KEYS[3], KEYS[4], KEYS[5]}) do
    redis.call("HDEL", key, id)
  end
  redis.call("ZREM", KEYS[7], id)
end
local ids
if ARGV[2] == "live" then
  ids = redis.call("SMEMBERS", KEYS[6])
elseif ARGV[2] == "set" then
  ids = redis.call("SMEMBERS", ARGV[3])
else
  ids = {}
  for i = 3, #ARGV do
    ids[#ids + 1] = ARGV[i]
  end
end
local found = {tonumber(redis.call("GET", KEYS[1]) or "0")}
for _, id in ipairs(ids) do
  local entry = redis.call("HGET", KEYS[2], id)
  if entry then
    found[#found + 1] = entry
    found[#found + 1] = redis.call("HGET", KEYS[5], id) or ""
  end
end
return found
