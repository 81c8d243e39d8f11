package e2e_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// playSlowClient evicts when the client has stopped reading and all buffers on the way
// are full. The backend has to be cancelled before the client reads on.
func playSlowClient(t *testing.T, bin string) []cell {
	var rows sheet
	for _, m := range []mode{none, streamed, duplex} {
		s := raise(t, bin, m, nil)
		for _, p := range s.paths {
			rows.row(names(m, p.name), func() string {
				var written atomic.Int64 // pieces
				c := sceneCall(p, func(c *call, w http.ResponseWriter, r *http.Request) error {
					piece := strings.Repeat(event(0), 4096)
					err := stream(w, r, piece)
					for ; err == nil; err = write(w, piece) {
						written.Add(1)
					}
					return err
				})
				slow := *p
				slow.client = &http.Client{Transport: pausing{p.client.Transport, c}}
				c.path = &slow
				s.start(s.Context(), c)
				if err := c.await(hasEnough); err != nil {
					return err.Error()
				}
				for before := int64(0); before < written.Load(); time.Sleep(100 * time.Millisecond) {
					before = written.Load()
				}
				if _, err := s.evict(c); err != nil {
					return err.Error()
				}
				if err := c.await(backendDone); err != nil {
					return err.Error()
				}
				late := ""
				if c.servedAt.Sub(c.evictedAt) > time.Second {
					late = "late"
				}
				close(c.look)
				return words(late, s.endFor(c, cut))
			})
		}
	}
	return rows.all()
}

// pausing reads no more of a response when the call has enough, until look is closed.
type pausing struct {
	http.RoundTripper
	c *call
}

func (t pausing) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = pausingBody{resp.Body, t.c}
	}
	return resp, err
}

type pausingBody struct {
	io.ReadCloser
	c *call
}

func (b pausingBody) Read(p []byte) (int, error) {
	if b.c.isSet(hasEnough) {
		<-b.c.look
	}
	return b.ReadCloser.Read(p)
}

// cut says whether the client got a part of a response, which may end in any way of
// losing a connection.
func cut(c *call) string {
	if c.reply.status == http.StatusOK && c.reply.body != "" && c.reply.err != nil {
		return "truncated"
	}
	return c.client()
}

// closeLog waits for n lines in the access log. The paths read no others from then on.
func (s *stage) closeLog(n int) {
	s.Helper()
	var lines []line
	var err error
	if log := s.paths[0].log; !eventually(func() bool {
		lines, err = log()
		return err != nil || len(lines) >= n
	}) || err != nil {
		s.Fatalf("%d lines in the access log, want %d: %v", len(lines), n, err)
	}
	for _, p := range s.paths {
		p.log = func() ([]line, error) { return lines, nil }
	}
}

// playThousand evicts a thousand requests at once, one half waiting, one mid body.
func playThousand(t *testing.T, bin string) []cell {
	const half = 500
	s := raise(t, bin, streamed, nil)
	ends := make(map[string][]string)
	var all []*call
	for _, ph := range moments {
		for range half {
			c := sceneCall(s.paths[1], ph.backend)
			all = append(all, s.start(s.Context(), c))
		}
	}
	for i, c := range all {
		c.must(t, moments[i/half].at)
	}
	victims, err := s.ev.Evict(s.Context(), evictor.Demand{N: 2 * half, Below: 1, Reason: abort.Preempted})
	if err != nil {
		t.Error(err)
	}
	s.closeLog(len(all))
	for i, c := range all {
		name := moments[i/half].name
		ends[name] = append(ends[name], s.outcome(c, (*call).got))
	}
	cells := []cell{{"victims", fmt.Sprint(len(victims))}}
	for _, ph := range moments {
		cells = append(cells, cell{ph.name, tally(ends[ph.name])})
	}
	return cells
}

// playRaces has evictions race with the ends of responses. Each client's end, each
// backend's and each line in the access log has to be what the outcome explains.
func playRaces(t *testing.T, bin string) []cell {
	const races, clients = 1000, 16
	var rows sheet
	for _, m := range []mode{streamed, duplex} {
		s := raise(t, bin, m, func(s *stage) { s.config.DelayedClose = new(time.Millisecond) })
		rows.row(m.String(), func() string {
			all := make([]*call, races)
			var next atomic.Int64
			var wg sync.WaitGroup
			for i := range clients {
				wg.Go(func() {
					for {
						n := int(next.Add(1)) - 1
						if n >= races {
							return
						}
						all[n] = sceneCall(s.paths[i%len(s.paths)], resumes)
						if err := s.race(all[n]); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			if t.Failed() {
				return "failed"
			}
			s.closeLog(races)
			won := 0
			var ends []string
			for _, c := range all {
				ends = append(ends, s.explain(c))
				if c.event.Outcome == abort.Aborted {
					won++
				}
			}
			winner := "either"
			if won == 0 || won == races {
				winner = fmt.Sprintf("%d_evicted", won)
			}
			return words(tally(ends), winner)
		})
	}
	return rows.all()
}

// race has the end of c's response and its eviction race.
func (s *stage) race(c *call) error {
	s.start(s.Context(), c)
	if err := c.await(hasEnough); err != nil {
		return err
	}
	close(c.resume)
	for until := time.Now().Add(rand.N(600 * time.Microsecond)); time.Now().Before(until); {
		runtime.Gosched()
	}
	victims, err := s.evict(c)
	if err != nil {
		return err
	}
	if err := c.await(done, observed); err != nil {
		return err
	}
	if won := c.event.Outcome == abort.Aborted; won != (len(victims) == 1) {
		return fmt.Errorf("%v, but %d victims", c.event.Outcome, len(victims))
	}
	return nil
}

// explain returns "explained" if all that came of c fits the outcome.
func (s *stage) explain(c *call) string {
	end := s.outcome(c, func(c *call) string {
		body, isEvent := strings.CutSuffix(c.reply.body, errorEvent)
		if c.reply.status != http.StatusOK || !c.path.reset(c.reply.err) || !strings.HasPrefix(events(3)+last, body) {
			return c.client()
		}
		if isEvent {
			return "error,reset"
		}
		return "reset"
	})
	for _, upstream := range []string{"finished", "cancelled"} {
		switch end {
		case words("whole", upstream, "200_via_upstream", abort.Completed),
			words("reset", upstream, "200_evicted_preempted", abort.Aborted),
			words("error,reset", upstream, "200_evicted_preempted", abort.Aborted):
			return "explained"
		}
		// On a machine that stalls for a second the answer is given up: Process ends with Aborted.
		if strings.HasPrefix(end, words("reset", upstream, "200_ext_proc_error_gRPC_error_10")) && strings.HasSuffix(end, words("", abort.Aborted)) {
			return "explained"
		}
	}
	return end
}
