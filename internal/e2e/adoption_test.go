package e2e_test

import (
	"testing"
)

// TestAdoptions holds the other ways to take the library in against the same matrix.
func TestAdoptions(t *testing.T) {
	for _, a := range []struct {
		name string
		adoption
	}{{"StreamInterceptor", intercepted}, {"RecvOrAbort", ownLoop}} {
		for _, m := range modes {
			t.Run(a.name+"/"+m.String(), func(t *testing.T) { testMatrix(t, setup{mode: m, adopt: a.adoption}) })
		}
	}
}

// TestBusyServer evicts while the ext_proc server does not look, and owes a reply to
// what has come since: the client has its end, the backend is cancelled and
// Handle.Done is closed all the same, before the server looks again.
func TestBusyServer(t *testing.T) {
	const want = `
		waiting   NONE                  429             cancelled  unknown
		mid-body  NONE                  3-events,reset  cancelled  reset
		waiting   STREAMED              429             cancelled  status
		mid-body  STREAMED              0-events,reset  cancelled  reset
		1.39: mid-body  STREAMED              429             cancelled  reset
		waiting   BUFFERED              429             cancelled  status
		mid-body  BUFFERED              429             cancelled  status
		waiting   FULL_DUPLEX_STREAMED  429             cancelled  status
		mid-body  FULL_DUPLEX_STREAMED  0-events,reset  cancelled  reset
		1.39: mid-body  FULL_DUPLEX_STREAMED  429             cancelled  reset
	`
	got := make(map[string][]string) // rows by path
	for _, m := range modes {
		w := start(t, setup{mode: m})
		last := requestEnd
		if m == none {
			last = requestHeaders
		}
		for _, ph := range []phase{
			{"waiting", "", last, waits, when(isBusy, wrote)},
			{"mid-body", "", responseHeaders, begins, func(m mode) []mark {
				if m == none {
					return []mark{isBusy, hasEnough}
				}
				return []mark{isBusy, wrote}
			}},
		} {
			for _, p := range w.paths {
				c, victims, err := w.evictIn(p, ph)
				if err != nil || victims != 1 {
					t.Fatalf("%s, %v, %s: %d victims, %v", p.name, m, ph.name, victims, err)
				}
				got[p.name] = append(got[p.name], row(ph.name, m, c.client(), c.upstream(), c.event.Answer))
			}
		}
	}
	compareRows(t, want, got)
}
