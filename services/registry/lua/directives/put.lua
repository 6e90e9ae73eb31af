-- Keeps new directives, all or none. KEYS: version, entries, digests, owners, reports, live, ended.
-- ARGV: version that must be the present one or -1, prefix of the index keys, seconds that an index lives, then for each
-- directive: id, server id, plan id, digest of its content, encoded entry.
-- Returns {"changed"} | {"taken", id} | {"kept", version}.
local version = tonumber(redis.call("GET", KEYS[1]) or "0")
if tonumber(ARGV[1]) >= 0 and tonumber(ARGV[1]) ~= version then
  return {"changed"}
end
local new = {}
for i = 4, #ARGV, 5 do
  local digest = redis.call("HGET", KEYS[3], ARGV[i])
  if not digest then
    new[#new + 1] = i
  elseif digest ~= ARGV[i + 3] then
    return {"taken", ARGV[i]}
  end
end
for _, i in ipairs(new) do
  local id = ARGV[i]
  redis.call("HSET", KEYS[2], id, ARGV[i + 4])
  redis.call("HSET", KEYS[3], id, ARGV[i + 3])
  redis.call("HSET", KEYS[4], id, ARGV[i + 1])
  redis.call("SADD", KEYS[6], id)
  for _, index in ipairs({"server:" .. ARGV[i + 1], "plan:" .. ARGV[i + 2]}) do
    redis.call("SADD", ARGV[2] .. index, id)
    redis.call("EXPIRE", ARGV[2] .. index, ARGV[3])
  end
end
if #new > 0 then
  version = redis.call("INCR", KEYS[1])
end
return {"kept", version}
