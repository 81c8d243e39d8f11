// Package admin is an HTTP endpoint for the operators of an ext_proc server: it lists
// the requests in flight, aborts them by id, drains an endpoint, and evicts by
// priority. Copy it, and mount it beside the server:
//
//	var registry abort.Registry
//	ev := evictor.New()
//	extprocpb.RegisterExternalProcessorServer(s, extproc.Wrap(yours, extproc.WithRegistry(&registry), extproc.WithTracker(ev, describe)))
//
//	l, err := admin.Listen("127.0.0.1:9003", false)
//	...
//	go admin.NewServer(admin.Handler(admin.Config{Registry: &registry, Evictor: ev, Log: slog.Default()})).Serve(l)
//
// Then:
//
//	curl 'http://127.0.0.1:9003/requests?limit=20'
//	curl http://127.0.0.1:9003/abort -d id=chatcmpl-42
//	curl http://127.0.0.1:9003/drain -d endpoint=10.0.0.7:8000
//	curl http://127.0.0.1:9003/evict -d n=1 -d below=0 -d dry_run=true
//
// One rule keeps requests safe: there is no authentication, so whoever can connect can
// end every request. Listen refuses what is not loopback; whoever lifts that puts
// something in front that knows who may.
package admin

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

const (
	maxForm     = 16 << 10         // bytes of a query, and of a body
	maxID       = 4 << 10          // bytes of a parameter; a longer id is found by the short form that /requests shows
	maxEvicted  = 1000             // requests that one call ends
	maxListed   = 1000             // requests that one call lists
	listed      = 100              // unless the call says how many
	maxDuration = 10 * time.Second // of one call: that long an Aborter may take
)

// A Config says whose requests they are.
type Config struct {
	Registry *abort.Registry  // finds them by id: the one of extproc.WithRegistry
	Evictor  *evictor.Evictor // knows what they hold

	// Hosts are the names by which the endpoint is called, beside localhost and IP
	// addresses. A browser that was lured to a name that its owner has pointed at
	// 127.0.0.1 is thus refused.
	Hosts []string

	// Log, if not nil, gets a line for each call that ended a request. Ids in it are
	// printable whatever the client sent.
	Log *slog.Logger
}

// Handler returns the endpoint:
//
//	GET  /requests  what is in flight: first what an eviction would choose first, then
//	                what waits and is not tracked. limit=100 (at most 1000), id=, endpoint=
//	POST /abort     ends every request that carries id=
//	POST /drain     ends every request at endpoint=, 1000 at most: stop routing there first
//	POST /evict     ends n= requests (1 to 1000) with a priority below=, as the evictor
//	                chooses; only those at endpoint=; with dry_run=true it only says which
//
// Parameters are a query or a form. Answers are JSON; an error is {"error": "..."}: 400
// for bad parameters, 502 if an Aborter has failed, whose requests are spared. The
// evictor's Aborter is asked by all three. Cross-site requests of browsers are refused.
// Handler panics without Registry or Evictor.
func Handler(c Config) http.Handler {
	if c.Registry == nil || c.Evictor == nil {
		panic("admin: no Registry or no Evictor")
	}
	mux := http.NewServeMux()
	handle := func(pattern string, serve func(*call), parameters ...string) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			ctx, cancel := context.WithTimeout(r.Context(), maxDuration)
			defer cancel()
			x := &call{Config: c, ctx: ctx, w: w}
			if x.parse(r, parameters) {
				serve(x)
			}
		})
	}
	handle("GET /requests", (*call).list, "limit", "id", "endpoint")
	handle("POST /abort", (*call).abort, "id")
	handle("POST /drain", (*call).drain, "endpoint")
	handle("POST /evict", (*call).evict, "n", "below", "endpoint", "dry_run")

	protection := http.NewCrossOriginProtection()
	protection.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fail(w, http.StatusForbidden, "cross-site requests are refused")
	}))
	next := protection.Handler(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !known(r.Host, c.Hosts) {
			fail(w, http.StatusMisdirectedRequest, "the host is neither localhost, an IP address, nor configured")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// A call is one request to the endpoint. It has answered when its method returns.
type call struct {
	Config
	ctx  context.Context
	w    http.ResponseWriter
	form map[string]string // the parameters given, each by an allowed name
}

func (x *call) list() {
	limit, ok := x.number("limit", listed, 1, maxListed)
	if !ok {
		return
	}
	var rows []Request
	if id, given := x.form["id"]; given {
		for _, h := range x.Registry.Lookup(id) {
			rows = append(rows, describe(id, h))
		}
	} else {
		rows = x.inFlight()
	}
	rows = at(rows, x.form["endpoint"])
	answer(x.w, http.StatusOK, List{Total: len(rows), Requests: rows[:min(limit, len(rows))]})
}

func (x *call) abort() {
	id := x.form["id"]
	if id == "" {
		fail(x.w, http.StatusBadRequest, "id is missing")
		return
	}
	// Those that are tracked by way of the evictor, whose Aborter has a say, and the rest
	// directly.
	found := make(map[*abort.Handle]bool)
	for _, h := range x.Registry.Lookup(id) {
		found[h] = true
	}
	victims, err := x.Evictor.Evict(x.ctx, evictor.Demand{
		N: len(found), Below: math.MaxInt, Reason: abort.Canceled,
		Spare: func(h *abort.Handle) bool { return !found[h] },
	})
	n := len(victims)
	if err == nil {
		n += x.Registry.Abort(id, abort.Canceled)
	}
	x.tell("abort", n, err, slog.String("id", printable(id)))
	x.result(Result{Ended: n}, err)
}

func (x *call) drain() {
	endpoint := x.form["endpoint"]
	if endpoint == "" {
		fail(x.w, http.StatusBadRequest, "endpoint is missing")
		return
	}
	victims, err := x.Evictor.Evict(x.ctx, evictor.Demand{N: maxEvicted, Below: math.MaxInt, Endpoint: endpoint, Reason: abort.Draining})
	left := 0
	for h := range x.Evictor.All() {
		for _, r := range h.Requests() {
			if r.Endpoint == endpoint {
				left++
				break
			}
		}
	}
	x.tell("drain", len(victims), err, slog.String("endpoint", printable(endpoint)))
	x.result(Result{Ended: len(victims), Remaining: &left}, err)
}

func (x *call) evict() {
	d := evictor.Demand{Endpoint: x.form["endpoint"], Reason: abort.Preempted}
	if endpoint, given := x.form["endpoint"]; given && endpoint == "" {
		fail(x.w, http.StatusBadRequest, "endpoint is empty: leave it out to mean any") // a script's unset variable
		return
	}
	for _, name := range []string{"n", "below"} {
		if x.form[name] == "" {
			fail(x.w, http.StatusBadRequest, name+" is missing")
			return
		}
	}
	switch x.form["dry_run"] {
	case "", "false":
	case "true":
		d.DryRun = true
	default:
		fail(x.w, http.StatusBadRequest, "dry_run must be true or false")
		return
	}
	var ok bool
	if d.N, ok = x.number("n", 0, 1, maxEvicted); !ok {
		return
	}
	if d.Below, ok = x.number("below", 0, math.MinInt, math.MaxInt); !ok {
		return
	}
	ids := x.ids() // before: a registry forgets who has ended
	victims, err := x.Evictor.Evict(x.ctx, d)
	rows := make([]Request, 0, len(victims))
	for _, h := range victims {
		rows = append(rows, describe(ids[h], h))
	}
	r := Result{Ended: len(victims), Requests: rows}
	if d.DryRun {
		r.Ended = 0
	}
	x.tell("evict", r.Ended, err, slog.Int("below", d.Below), slog.String("endpoint", printable(d.Endpoint)))
	x.result(r, err)
}

// tell logs a call that did something.
func (x *call) tell(what string, ended int, err error, attrs ...slog.Attr) {
	if x.Log == nil || ended == 0 && err == nil {
		return
	}
	attrs = append(attrs, slog.Int("ended", ended))
	if err != nil {
		attrs = append(attrs, slog.String("error", printable(err.Error())))
	}
	x.Log.LogAttrs(x.ctx, slog.LevelInfo, "admin: "+what, attrs...)
}

// result answers a call that may have failed in part.
func (x *call) result(r Result, err error) {
	status := http.StatusOK
	if err != nil {
		status, r.Error = http.StatusBadGateway, cut(err.Error(), maxText)
		if errors.Is(err, context.DeadlineExceeded) {
			status = http.StatusGatewayTimeout
		}
	}
	answer(x.w, status, r)
}

func fail(w http.ResponseWriter, status int, text string) {
	answer(w, status, struct {
		Error string `json:"error"`
	}{text})
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(v) // escapes HTML and control bytes; fails only if the client has left
}
