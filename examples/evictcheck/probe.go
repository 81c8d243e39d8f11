package main

import (
	"context"
	"time"
)

// probed is how many tokens the engine is let generate before it is hung up on, and
// probe how many it may at most.
const probed, probe = 8, 256

// askEngine finds out what the engine does when a stream's connection is closed, without
// anything in between. If it can't it says so in a note: it matters only if evictions
// have no effect.
func (c *check) askEngine(ctx context.Context) error {
	if c.engine == "" {
		return nil
	}
	tokens := min(c.tokens, probe)
	s := c.start(ctx, c.engine, true, tokens)
	defer c.stop(s)
	var before sample
	ready, err := c.watch(ctx, c.effect, "a stream that goes to the engine directly", func(m sample) bool {
		before = m
		v := s.look()
		return !v.end.IsZero() || v.tokens >= probed && m.running > c.idle.running
	})
	v := s.look()
	switch {
	case err != nil:
		return err
	case !ready:
		c.note("the engine was not asked alone: its stream had %d tokens after %v", v.tokens, c.effect)
		c.stop(s)
		_, err := c.watch(ctx, c.effect, "the engine to end it", func(m sample) bool { return m.running <= c.idle.running })
		return err
	case !v.end.IsZero():
		c.note("the engine was not asked alone: %s (-engine says where it is)", v.why())
		return nil
	}
	// If it takes about as long as the rest of the answer, the engine was not stopped.
	whole := time.Since(v.first) / time.Duration(v.tokens-1) * time.Duration(tokens)
	c.stop(s)
	dropped := time.Now()
	e := new(EngineReport)
	c.report.Engine = e
	var half, last sample // in the middle of the time, and at its end
	freed, err := c.watch(ctx, c.effect, "the engine to end it", func(m sample) bool {
		if half.at.IsZero() && m.at.Sub(dropped) > c.effect/2 {
			half = m
		}
		last = m
		if m.running > c.idle.running {
			return false
		}
		ended := m.finished > before.finished && c.idle.running == 0 || m.at.Sub(dropped) > whole*3/4
		if e.Frees = !ended; e.Frees {
			e.FreedMS = since(dropped, m.at)
		}
		return true
	})
	if err != nil {
		return err
	}
	switch {
	case e.Frees:
		c.say("engine", "alone: a stream's connection was closed, freed after %s", ms(e.FreedMS))
	case freed:
		c.say("engine", "alone: a stream's connection was closed, and the request ran to its end")
	case c.idle.running == 0 && last.generated == half.generated:
		e.Leaks = true
		c.say("engine", "alone: a stream's connection was closed, the request stopped, and its place is not free after %v", c.effect)
	default:
		c.say("engine", "alone: a stream's connection was closed, and the request still runs after %v", c.effect)
		_, err = c.watch(ctx, whole+c.effect, "the engine to finish it", func(m sample) bool { return m.running <= c.idle.running })
	}
	return err
}
