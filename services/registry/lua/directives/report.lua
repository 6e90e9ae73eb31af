-- Notes what a server says about its directive. KEYS: as put.lua.
-- ARGV: server id, directive id, encoded report, 1 if the directive has ended, seconds since 1970, 1 if an ended one
-- may be revived.
-- Returns 1 if it was noted, 0 if there is no such directive of this server, or it has ended.
local id = ARGV[2]
if redis.call("HGET", KEYS[4], id) ~= ARGV[1] then
  return 0
end
local live = redis.call("SISMEMBER", KEYS[6], id) == 1
if not live and ARGV[6] ~= "1" then
  return 0
end
redis.call("HSET", KEYS[5], id, ARGV[3])
if ARGV[4] == "1" then
  redis.call("SREM", KEYS[6], id)
  redis.call("ZADD", KEYS[7], ARGV[5], id)
else
  redis.call("SADD", KEYS[6], id)
  redis.call("ZREM", KEYS[7], id)
end
redis.call("INCR", KEYS[1])
return 1
