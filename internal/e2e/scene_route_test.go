package e2e_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// playHTTP2Upstream has HTTP/2 behind Envoy.
func playHTTP2Upstream(t *testing.T, bin string) []cell {
	var rows sheet
	for _, m := range []mode{none, duplex} {
		s := raise(t, bin, m, func(s *stage) { s.config.Upstream.HTTP2 = true })
		for _, p := range s.paths {
			for _, ph := range moments {
				rows.row(names(ph.name, m, p.name), func() string {
					return s.evicted(sceneCall(p, ph.backend), ph.at)
				})
			}
		}
	}
	return rows.all()
}

// playChain evicts from either of two ext_procs. Besides the end of the request, the
// cells have what the other made of it, and whether it was shown a response. One that
// is mute does not answer when it is shown one.
func playChain(t *testing.T, bin string) []cell {
	var rows sheet
	for _, x := range []struct {
		first, second mode
		mute          bool
	}{
		{first: none, second: none},
		{first: none, second: buffered},
		{first: streamed, second: streamed},
		{first: streamed, second: streamed, mute: true},
		{first: streamed, second: duplex},
		{first: duplex, second: streamed},
		{first: duplex, second: duplex},
	} {
		other, l := actor(t, x.second), listen(t)
		other.serve(l)
		s := raise(t, bin, x.first, func(s *stage) {
			filter := other.filter(l)
			if x.mute {
				filter.MessageTimeout = 300 * time.Millisecond
			}
			s.config.ExtProc = append(s.config.ExtProc, filter)
		})
		t.Cleanup(other.leftovers)
		play := func(phase string, b backend, at func(c, o *call) error, from string) {
			rows.row(names(phase, x.first, x.second, from), func() string {
				c := sceneCall(s.paths[0], b)
				o := &call{path: c.path, uri: c.uri, resume: make(chan struct{})} // what the second knows of it
				other.expect(o)
				if x.mute {
					o.hold = responseHeaders
				}
				s.start(s.Context(), c)
				if err := at(c, o); err != nil {
					return err.Error()
				}
				victim, bystander, evict := c, o, s.evict
				if from == "from-second" {
					victim, bystander, evict = o, c, other.evict
				}
				_, err := evict(victim)
				if err := errors.Join(err, c.await(done)); err != nil {
					return err.Error()
				}
				close(o.resume)
				if err := o.await(hungUp, observed); err != nil {
					return err.Error()
				}
				request := s.request(c, (*call).got)
				shown := "not-shown"
				if slices.Contains(bystander.seen, responseHeaders) {
					shown = "shown"
				}
				return words(request, victim.event.Outcome, victim.event.Effect, "other", bystander.event.Outcome, shown)
			})
		}
		waiting := func(c, _ *call) error { return c.await(wrote) }
		if x.mute {
			play("waiting-mute", waits, waiting, "from-first")
			continue
		}
		midBody := func(c, _ *call) error { return c.await(hasEnough) }
		if x.second == buffered { // the first comes after it
			midBody = func(c, o *call) error { return errors.Join(c.await(wrote), o.await(replied(responseHeaders))) }
		}
		for _, from := range []string{"from-first", "from-second"} {
			play("waiting", waits, waiting, from)
			play("mid-body", begins, midBody, from)
		}
	}
	return rows.all()
}

// playLocalReply has Envoy rewrite the answer.
func playLocalReply(t *testing.T, bin string) []cell {
	const ours = `{"filter":{"status_code_filter":{"comparison":{"op":"EQ","value":{"default_value":429,"runtime_key":"none"}}}}`
	var rows sheet
	for _, reply := range []struct{ name, config string }{
		{"status", `{"mappers":[` + ours + `,"status_code":503}]}`},
		{"body", `{"mappers":[` + ours + `,"body":{"inline_string":"instead"}}]}`},
		{"body-format", `{"mappers":[` + ours + `,"body_format_override":{"text_format_source":{"inline_string":"around(%LOCAL_REPLY_BODY%)"},"content_type":"text/html"}}]}`},
		{"all-bodies", `{"body_format":{"json_format":{"code":"%RESPONSE_CODE%"}}}`},
	} {
		s := raise(t, bin, none, func(s *stage) { s.config.LocalReply = json.RawMessage(reply.config) })
		for _, ph := range moments {
			rows.row(names(reply.name, ph.name), func() string {
				return s.evicted(sceneCall(s.paths[1], ph.backend), ph.at)
			})
		}
	}
	return rows.all()
}

// raiseRetrying has the route retry what it can, 429 too, after a random time up to
// backOff.
func raiseRetrying(t *testing.T, bin, backOff string) (*stage, *tries) {
	n := &tries{}
	return raise(t, bin, none, func(s *stage) {
		s.config.RetryPolicy = json.RawMessage(`{"retry_on":"5xx,reset,retriable-status-codes","retriable_status_codes":[429],"num_retries":3,
			"retry_back_off":{"base_interval":"` + backOff + `","max_interval":"1000s"}}`)
		s.backend = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if n.of(r.URL.RequestURI()).Add(1) == 1 && r.Header.Get(firstTry) == "fails" {
				panic(http.ErrAbortHandler)
			}
			s.ServeHTTP(w, r)
		})
	}), n
}

// firstTry is a request header: if it is "fails" the backend resets the first try.
const firstTry = "X-First-Try"

// tries counts how often the backend is called, by uri.
type tries struct{ m sync.Map }

func (t *tries) of(uri string) *atomic.Int64 {
	n, _ := t.m.LoadOrStore(uri, new(atomic.Int64))
	return n.(*atomic.Int64)
}

// playRetries evicts where the route retries. The last word is how often the backend
// was called.
func playRetries(t *testing.T, bin string) []cell {
	var rows sheet
	s, n := raiseRetrying(t, bin, "0.001s")
	play := func(s *stage, n *tries, name, first string, b backend, reached func(*call) error) {
		rows.row(name, func() string {
			c := sceneCall(s.paths[0], b)
			c.header.Set(firstTry, first)
			s.start(s.Context(), c)
			if err := reached(c); err != nil {
				return err.Error()
			}
			if _, err := s.evict(c); err != nil {
				return err.Error()
			}
			return words(s.end(c), "tries", n.of(c.uri).Load())
		})
	}
	for _, ph := range moments {
		at := func(c *call) error { return c.await(ph.at) }
		play(s, n, names(ph.name, "first-try"), "works", ph.backend, at)
		play(s, n, names(ph.name, "retry"), "fails", ph.backend, at)
	}
	s, n = raiseRetrying(t, bin, "1000s")
	play(s, n, "back-off", "fails", waits, func(*call) error { return s.stat("cluster.upstream.upstream_cx_destroy_remote_with_active_rq", 1) })
	return rows.all()
}

// playConnectionQueue has two requests for one connection to the upstream, and evicts
// one of them.
func playConnectionQueue(t *testing.T, bin string) (cells []cell) {
	s := raise(t, bin, none, func(s *stage) { s.config.Upstream.MaxConnections = 1 })
	for _, p := range s.paths {
		for _, ph := range []struct {
			name         string
			first, next  backend
			at           mark
			evictsQueued bool
		}{
			{"evict-waiting", waits, finishes, wrote, false},
			{"evict-mid-body", begins, finishes, hasEnough, false},
			{"evict-queued", resumes, waits, hasEnough, true},
		} {
			first, next := sceneCall(p, ph.first), sceneCall(p, ph.next)
			first.trailer, next.trailer = true, true
			s.start(s.Context(), first)
			first.must(t, ph.at)
			s.start(s.Context(), next)
			if err := s.stat("cluster.upstream.upstream_rq_pending_active", 1); err != nil {
				t.Fatal(err)
			}
			victim, other := first, next
			if ph.evictsQueued {
				victim, other = next, first
			}
			if _, err := s.evict(victim); err != nil {
				t.Fatal(err)
			}
			end := s.end(victim)
			close(first.resume)
			cells = append(cells, cell{names(ph.name, p.name), words(end, "other", s.end(other))})
		}
	}
	return cells
}
