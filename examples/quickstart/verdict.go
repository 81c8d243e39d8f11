package main

import (
	"fmt"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/engine"
)

// An eviction is what became of a victim.
type eviction struct {
	extproc.Event
	abort.Request            // what the picker said of it
	victim        *request   // as its client saw it
	dropped       engine.End // zero if the engine didn't abort it
	before        sample     // the last before the decision
	after         sample     // the first that shows the victim's KV blocks free; zero if none does
}

// evictions returns those of an act, on an engine with so many KV blocks.
func (a *act) evictions(blocks int) []eviction {
	var all []eviction
	for id, e := range a.streams {
		if e.Outcome != abort.Aborted {
			continue
		}
		v := eviction{Event: e, Request: described(e), victim: a.clients[id]}
		if end := a.engines[id]; end.Reason == "abort" && !end.Canceled.IsZero() {
			v.dropped = end
		}
		// Half, since the others grow meanwhile and the urgent request takes a few.
		freed := float64(kvBlocks(v.dropped.PromptTokens, v.dropped.Tokens)) / float64(blocks) / 2
		for _, m := range a.samples {
			if !m.at.After(e.Settled) {
				v.before = m
			} else if m.kv < v.before.kv-freed {
				v.after = m
				break
			}
		}
		all = append(all, v)
	}
	return all
}

// ttft returns the urgent request's time to first token.
func (a *act) ttft() time.Duration { return a.urgent().first.Sub(a.urgent().sent) }

// completed returns how many batch requests are complete.
func (a *act) completed() (n int) {
	for _, r := range a.batch() {
		if r.complete() {
			n++
		}
	}
	return n
}

// check returns what is not as it should be in an act without eviction and one with it.
func (s *story) check(without, with *act) (failed []string) {
	fail := func(format string, a ...any) { failed = append(failed, fmt.Sprintf(format, a...)) }
	evicted := with.evictions(s.engine.blocks)

	if n := len(without.evictions(s.engine.blocks)); n != 0 {
		fail("without eviction: %d requests were evicted", n)
	}
	if n := without.completed(); n != s.requests {
		fail("without eviction: only %d of %d batch requests are complete", n, s.requests)
	}
	if n := with.completed(); n != s.requests-len(evicted) {
		fail("with eviction: %d of %d batch requests are complete, and %d were evicted", n, s.requests, len(evicted))
	}
	for _, a := range []*act{without, with} {
		if a.full.running != s.requests {
			fail("the engine was not full: %s", a.full.text(s.requests))
		}
		if !a.urgent().complete() {
			fail("the urgent request is not complete: %v", a.urgent().err)
		}
		if n := a.samples[len(a.samples)-1].preemptions; n != 0 {
			fail("the engine has preempted %d requests by itself", n)
		}
	}
	if a, b := with.ttft(), without.ttft(); a >= b {
		fail("the urgent request's first token took %v with eviction and %v without", a, b)
	}
	if len(evicted) != 1 {
		fail("%d requests were evicted, want 1", len(evicted))
	}
	for _, v := range evicted {
		if v.Priority >= urgentPriority {
			fail("%s was evicted, whose priority is %d", v.ID, v.Priority)
		}
		if v.victim.err == nil {
			fail("%s was evicted, and its client's stream was not cut", v.ID)
		}
		if v.Answer == extproc.AnswerEvent && v.victim.event == (apiError{}) {
			fail("%s was evicted, and its client didn't get the error event", v.ID)
		}
		if v.dropped == (engine.End{}) {
			fail("%s was evicted, and the engine did not abort it", v.ID)
		}
		if v.after == (sample{}) {
			fail("%s was evicted, and /metrics never showed its KV blocks free", v.ID)
		}
	}
	return failed
}

// result shows the figures of two acts that were as they should be.
func (s *story) result(without, with *act) {
	of := func(a *act) string { return fmt.Sprintf("%d of %d", a.completed(), s.requests) }
	s.out.print("\n3  Result\n")
	s.out.table([][]string{
		{"", "without eviction", "with eviction"},
		{"urgent: first token after", ms(without.ttft()), ms(with.ttft())},
		{"urgent: complete after", ms(without.urgent().end.Sub(without.urgent().sent)), ms(with.urgent().end.Sub(with.urgent().sent))},
		{"batch: complete", of(without), of(with)},
		{"batch: evicted", "0", "1"},
	})

	v := with.evictions(s.engine.blocks)[0]
	since := func(t time.Time) string { return ms(t.Sub(v.Settled)) }
	rows := [][]string{{"from the decision to evict " + v.ID + " until", ""}}
	if v.Answer == extproc.AnswerEvent {
		rows = append(rows, []string{"- its client had the error event", since(v.victim.told)})
	}
	s.out.print("")
	s.out.table(append(rows,
		[]string{"- its client's stream had ended", since(v.victim.end)},
		[]string{"- the engine's request was canceled", since(v.dropped.Canceled)},
		[]string{"- the engine had freed its KV blocks", since(v.dropped.At)},
		[]string{fmt.Sprintf("- /metrics showed them free, KV cache %s -> %s", percent(v.before.kv), percent(v.after.kv)), since(v.after.at)},
		[]string{"- urgent had its first token", since(with.urgent().first)},
	))
	s.out.print("\nWith eviction urgent had its first token %.0f times sooner. It cost %s its\n%d tokens, and the other %d batch requests nothing.",
		float64(without.ttft())/float64(with.ttft()), v.ID, v.victim.received.Load(), with.completed())
}
